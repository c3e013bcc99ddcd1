"""What a seed promises (docs/search.md): bit for bit on one machine, in fp32.

1. The same method, settings and seed: the same samples, at any batch size, again and again.
2. Another batch size: the same samples where a draft depends on its own text alone, or where the
   rule draws the same whatever was drafted. Not where trajectories share a memory and drafts are
   drawn: what a trajectory drafts then hangs on how far the others have come; the law does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny
from traces_left import held

import forerun
from forerun import registry
from forerun.api import Model
from forerun.core.cost import Cost
from forerun.drafters.auto import Auto
from forerun.drafters.stand import Stand
from forerun.search.best_of import best_of
from forerun.search.dvts import dvts
from forerun.search.step_beam import step_beam

BATCHES = (1, 2, 5, 8)
REQUEST: dict[str, Any] = {"seed": 11, "temperature": 0.8, "max_new_tokens": 40}
FIXED = {"controller": "fixed:nodes=6,depth=6"}
ALONE = {  # drafts that depend on their own text and seed
    "none": {"drafter": "none"},
    "own memory": {"drafter": "stand:scope=request"},
    "prompt lookup": {"drafter": "prompt_lookup"},
    "own memory, template": {"drafter": "stand:scope=request,tree=template"},
    "best tokens, match": {"drafter": "stand:choice=top", "verifier": "match"},
}
SHARED = {  # what trajectories share is theirs alone: other calls teach them nothing
    "default": {},
    "auto": {"drafter": "auto:run=2"},
    "stand, wide": {"drafter": "stand:scope=tenant"},
    "suffix": {"drafter": "suffix:factor=4"},
    "token recycling": {"drafter": "token_recycling"},
    "aded": {"drafter": "aded:iterations=4"},
    "stand": {"drafter": "stand"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("seeds") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return forerun.load(folder, dtype="fp32", max_seqs=40)


def samples(model: Model, batch: int, **parts: Any) -> list[list[int]]:
    (result,) = model.generate(
        "the cat sat on the mat and", n=8, batch=batch, **FIXED, **parts, **REQUEST
    )
    return [sample.tokens for sample in result.samples]


@pytest.mark.parametrize("batch", [1, 5])
def test_the_default_controller_plans_alike_where_passes_cost_the_same(
    folder: Path, batch: int
) -> None:
    """Where they are measured anew its plans, and so the samples, may be others."""

    def found(per_row: float) -> tuple[list[list[int]], int]:
        model = forerun.load(folder, dtype="fp32", max_seqs=40)
        model.target.cost = Cost((1, 65), (0.01, 0.01 + 64 * per_row))
        (result,) = model.generate("the cat sat on the mat and", n=8, batch=batch, **REQUEST)
        return [sample.tokens for sample in result.samples], result.stats.drafted

    cheap, dear = found(1e-6), found(0.01)
    assert found(1e-6) == cheap and found(0.01) == dear
    assert cheap[1] > dear[1], "else nothing was planned by costs"


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", [*ALONE, *SHARED])
def test_the_same_run_again_is_the_same_bit_for_bit(
    folder: Path, model: Model, name: str, batch: int
) -> None:
    """In the same process with a warm cache, and on a model that was loaded anew."""
    parts = (ALONE | SHARED)[name]
    first = samples(model, batch, **parts)
    model.generate("the cat sat", **FIXED, **parts, temperature=0.8, max_new_tokens=20)
    assert samples(model, batch, **parts) == first
    fresh = forerun.load(folder, dtype="fp32", max_seqs=40)
    assert samples(fresh, batch, **parts) == first


@pytest.mark.parametrize("name", SHARED)
def test_a_seeded_call_leaves_no_trace(model: Model, name: str) -> None:
    drafter = model.drafter(SHARED[name].get("drafter", registry.DEFAULT_DRAFTER))
    before = drafter.memory_report(), held(drafter)
    samples(model, 4, **SHARED[name])
    assert (drafter.memory_report(), held(drafter)) == before


def test_what_one_asks_to_keep_learns_whatever_the_seed(folder: Path, tmp_path: Path) -> None:
    """A drafter that the caller holds, or whose memory is a file's, is the caller's to mind."""
    model = forerun.load(folder, dtype="fp32", max_seqs=40)
    name = "stand:scope=tenant"
    held = Stand(scope="tenant")
    taught = [samples(model, 4, drafter=held) and held.snapshot().counts["tokens"] for _ in "ab"]
    assert 0 < taught[0] < taught[1]
    samples(model, 4, drafter=name)
    assert model.drafter(name).snapshot().counts["tokens"] == 0
    with model.memory(tmp_path / "a.mem", drafter=name) as kept:
        first = samples(model, 4, drafter=name)
    assert kept.after.snapshot.counts["tokens"] == taught[0]
    again = forerun.load(folder, dtype="fp32", max_seqs=40)
    with again.memory(tmp_path / "a.mem", drafter=name):
        warm = samples(again, 4, drafter=name)
    assert warm != first == samples(model, 4, drafter=name)  # without the file as before


@pytest.mark.parametrize("name", ALONE)
def test_any_batch_size_gives_the_same_samples_where_drafts_are_ones_own(
    model: Model, name: str
) -> None:
    assert len({str(samples(model, batch, **ALONE[name])) for batch in BATCHES}) == 1


def test_match_over_the_best_tokens_gives_the_samples_of_plain_decoding(model: Model) -> None:
    """One draw per token, whatever was drafted: drafting on or off, any batch, shared memory."""
    plain = samples(model, 1, drafter="none")
    for batch in BATCHES:
        assert samples(model, batch, **ALONE["best tokens, match"]) == plain


def test_a_sample_does_not_depend_on_how_many_follow(model: Model) -> None:
    def some(n: int) -> list[list[int]]:
        options = {"drafter": "stand", **FIXED, **REQUEST}
        return [s.tokens for s in best_of(model, "one two three", n=n, **options).samples]

    assert some(8)[:3] == some(3)


@pytest.mark.parametrize("method", [step_beam, dvts])
@pytest.mark.parametrize("drafter", ["none", "stand"])
def test_searches_come_out_the_same_again(model: Model, method: Any, drafter: str) -> None:
    def tree(batch: int) -> list[list[int]]:
        options = {"drafter": drafter, "step_end": " ", "step_tokens": 8, **FIXED, **REQUEST}
        found = method(
            model, "one two", scorer=lambda p, t: len(t) % 5, n=8, width=4, batch=batch, **options
        )
        return [branch.tokens for branch in found.tree]

    for batch in BATCHES:
        assert tree(batch) == tree(batch)
    if drafter == "none":
        assert tree(1) == tree(8)


def test_who_drafts_hangs_on_no_earlier_call(folder: Path) -> None:
    """What a draft model's slots hold of a prompt is no reason to choose it."""
    whole, draft = (forerun.load(folder, dtype="fp32", max_seqs=40) for _ in range(2))
    whole.target.cost, draft.target.cost = Cost((1, 65), (1.0, 2.0)), Cost((1, 200), (0.01, 40.0))
    found = []
    for _ in range(2):
        auto = Auto(model=draft.target, target=whole.target, tokenizer=whole.tokenizer)
        prompt = "the cat sat on the mat and " * 7
        (result,) = whole.generate(prompt, n=1, drafter=auto, **FIXED, **REQUEST)
        assert result.stats.drafted_by["draft_model"] > 0
        found.append([sample.tokens for sample in result.samples])
    assert found[0] == found[1]
