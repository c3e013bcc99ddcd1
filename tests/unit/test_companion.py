"""The draft model that comes with a model: found, shared, left out; what is said of mistakes."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_tiny

import forerun
from forerun.api import Model
from forerun.assets import embedded
from forerun.bench.inflate import inflate
from forerun.cli.options import check_parts
from forerun.core.dice import SeededDice
from forerun.core.mixins import parts_of
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.drafters import _draft_runner
from forerun.drafters.draft_model import DraftModel
from forerun.errors import ConfigError, ModelError
from forerun.models.draft_link import FILE, companion
from forerun.serving.methods import Methods
from forerun.verifiers.speculative import Speculative

pytestmark = pytest.mark.usefixtures("short_collections")

OTHER = "have different vocabularies"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("companion") / "tiny")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy that names no draft."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture(scope="module")
def reasoner() -> Model:
    return forerun.load("reasoner", dtype="fp32")


def drafts(drafter: Drafter) -> list[DraftModel]:
    return [part for part in parts_of(drafter) if isinstance(part, DraftModel)]


def name(folder: Path, draft: Any) -> Path:
    (folder / FILE).write_text(draft if isinstance(draft, str) else json.dumps(draft))
    return folder


def test_the_reasoner_comes_with_its_draft(reasoner: Model) -> None:
    """One runner for all that ask, of the target's number type."""
    assert companion(Path(embedded("reasoner"))) == Path(embedded("draft"))
    specs = "auto", "auto:scope=group", "auto:model=own", "auto:model=draft"
    found = [drafts(reasoner.drafter(spec)) for spec in specs]
    assert [len(each) for each in found] == [1, 1, 1, 1]
    assert len({each[0].runner for each in found}) == 1
    assert found[0][0].runner.model.dtype == reasoner.target.model.dtype == torch.float32
    assert "weights" in str(reasoner.drafter("auto").memory_report())
    router = Methods({}, None, **reasoner.offers).dispatcher(Speculative())
    assert drafts(router.by_name["auto"].drafter)[0].runner is found[0][0].runner
    other = forerun.load("reasoner", dtype="bf16")
    assert drafts(other.drafter("auto"))[0].runner.model.dtype == torch.bfloat16


def test_a_shared_draft_counts_once_and_goes_with_its_last_drafter(tiny: Path) -> None:
    model = forerun.load(str(tiny))
    specs = f"auto:model={tiny}", f"auto:model={tiny},scope=group"
    sizes = [model.drafter(spec).memory_report()["part 2: draft weights"] for spec in specs]
    assert sizes[0] == sizes[1] > 0, "each uses it"
    found = [size for what, size in model.memory_report().items() if "draft weights" in what]
    assert found == sizes[:1], "both hold one"
    assert copy.deepcopy(sizes) == pickle.loads(pickle.dumps(sizes)) == sizes, "records are copied"
    runner = weakref.ref(drafts(model.drafter(specs[0]))[0].runner)
    del model
    gc.collect()
    assert runner() is None


def test_one_can_go_without(reasoner: Model, folder: Path) -> None:
    assert not drafts(reasoner.drafter("auto:model=none"))
    assert not drafts(forerun.load(folder).drafter("auto")), "it names none"
    assert not drafts(reasoner.drafter("auto:parts=suffix+prompt_lookup")), "the user's own parts"


def test_a_folder_is_relative_to_the_models_or_absolute(folder: Path, tiny: Path) -> None:
    beside = shutil.copytree(tiny, folder.parent / "small")
    for given, found in (("../small", beside), (str(tiny), tiny)):
        name(folder, {"model": given})
        assert companion(folder).samefile(found)
        (draft,) = drafts(forerun.load(folder).drafter("auto"))
        assert draft.runner.vocab_size == 288


BROKEN = {
    "no JSON": ("draft", 'expected {"model": "DRAFT"}, the folder of a draft model, got \'draft\''),
    "no object": ([], "expected"),
    "no name": ({"draft": "x"}, 'got \'{"draft": "x"}\''),
    "a number": ({"model": 3}, "got '{\"model\": 3}'"),
    "not there": ({"model": "gone"}, "names the draft 'gone', and there is no model in"),
    "no download": ({"model": "someone/draft"}, "there is no model in"),
    "itself": ({"model": "."}, "names the model itself"),
    "nobody's home": ({"model": "~nosuchuser/a"}, "cannot be used"),
    "too long": ({"model": "x" * 5000}, "cannot be used"),
    "another vocabulary": ({"model": "draft"}, OTHER),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_mistake_is_said_once_and_decoding_goes_on(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, said = BROKEN[case]
    model = forerun.load(name(folder, given))
    with caplog.at_level(logging.WARNING, "forerun"):
        for spec in ("auto", "auto:scope=group"):
            result = model.generate(["the cat"], temperature=0, max_new_tokens=8, drafter=spec)[0]
            assert result.samples[0].tokens and not drafts(model.drafter(spec))
    (warning,) = [r.message for r in caplog.records if "draft model of this model" in r.message]
    assert said in warning


def test_weights_that_cannot_be_read_are_a_mistake_too(
    folder: Path, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = Path(shutil.copytree(tiny, folder / "small"))
    (draft / "model.safetensors").write_bytes(b"torn")
    name(folder, {"model": "small"})
    with caplog.at_level(logging.WARNING, "forerun"):
        assert not drafts(forerun.load(folder).drafter("auto"))
    assert "auto runs without the draft model of this model" in caplog.text


def test_a_mistake_in_what_was_asked_for_by_name_is_an_error(folder: Path) -> None:
    model = forerun.load(folder)
    with pytest.raises(ConfigError, match=OTHER):
        model.drafter("auto:model=draft")
    with pytest.raises(ModelError, match="gone"):
        model.drafter("auto:model=./gone")


def test_options_are_checked_before_a_model_is_loaded_and_nothing_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr("forerun.models.paths._fetched", lambda *args: asked.append(args[0]))
    for spec in ("auto", "auto:model=own", "auto:model=none", "auto:model=draft"):
        check_parts(drafter=spec)
    assert not asked
    with pytest.raises(ModelError, match="there is no model folder"):
        check_parts(drafter="auto:model=./gone")


def test_an_inflated_model_keeps_the_draft(folder: Path, tmp_path: Path) -> None:
    """By a name that holds from wherever the new folder is; a wrong one before anything is made."""
    big = inflate("reasoner", tmp_path / "big", "30M").folder
    assert companion(big) == Path(embedded("draft"))
    small = shutil.copytree(folder, folder.parent / "small")
    name(folder, {"model": "../small"})
    assert companion(inflate(folder, tmp_path / "far" / "own", "30M").folder).samefile(small)
    name(folder, {"model": "gone"})
    with pytest.raises(ModelError, match="gone"):
        inflate(folder, tmp_path / "none", "30M")
    assert not (tmp_path / "none").exists()


def test_the_same_seed_says_the_same_again(
    reasoner: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts of the draft model, whatever other calls have asked for in between."""
    monkeypatch.setattr(_draft_runner, "COLD_FACTOR", 0.0)  # else no draft pays

    def run(plan: str, seed: int | None) -> list[list[int]]:
        options: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 60, "n": 3, "seed": seed}
        (result,) = reasoner.generate(["Problem: Tom has 3 apples."], controller=plan, **options)
        assert result.stats.drafted_by["draft_model"] > 0
        return [sample.tokens for sample in result.samples]

    for plan in ("budget", "fixed:nodes=5"):
        first = run(plan, 7)
        run(plan, None)
        assert run(plan, 7) == first


def test_fewer_run_at_once_where_the_draft_has_no_room(
    reasoner: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    (draft,) = drafts(reasoner.drafter("auto"))
    monkeypatch.setattr(draft.runner.cache, "max_slots", 2)
    run = reasoner.run(["Problem: Tom has 3 apples."], n=6, max_new_tokens=8, seed=1)
    assert run.engine.scheduler.max_seqs == 2
    assert len(list(run)) == 6


def test_a_draft_of_many_says_what_it_says_of_one(reasoner: Model) -> None:
    """To the bit, whatever the others ask for: laws of a batch are computed in one call."""
    (draft,) = drafts(reasoner.drafter("auto"))
    texts = [reasoner.tokenizer.encode(f"Problem: Tom has {i} apples.") for i in range(5)]
    samplings = [Sampling(temperature=t) for t in (0.3, 1.0, 1.7, 0.6)]
    for last in (Sampling(), Sampling(top_p=0.9), Sampling(temperature=0.0)):
        asked = [*samplings, last]

        def trees(rows: list[int], asked: list[Sampling] = asked) -> list[Tree]:
            seqs = [
                Sequence([*texts[i]], len(texts[i]), asked[i], SeededDice(i), limit=50)
                for i in rows
            ]
            found = draft.propose(seqs, [Plan(6)] * len(seqs), [s.dice for s in seqs])
            for seq in seqs:
                draft.finish(seq)
            return found

        together = trees([*range(5)])
        for i, tree in enumerate(together):
            (alone,) = trees([i])
            assert np.array_equal(alone.tokens, tree.tokens) and len(tree)
            assert np.array_equal(alone.q_probs, tree.q_probs)
