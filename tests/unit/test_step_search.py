"""Beam search over steps and DVTS: what is computed, kept, dropped, and said."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

import forerun
from forerun.api import Model
from forerun.core.sampling import Sampling
from forerun.drafters.stand import Stand
from forerun.errors import ConfigError, UnknownName
from forerun.search._arithmetic import arithmetic, numbers, value
from forerun.search._session import Session
from forerun.search._steps import BranchesLost, by_rank
from forerun.search.dvts import dvts
from forerun.search.step_beam import step_beam

METHODS = {"step_beam": step_beam, "dvts": dvts}
PROMPT = "one two three four five six seven eight nine ten and then"
FEW: dict[str, Any] = {
    "step_end": " ",
    "step_tokens": 6,
    "max_new_tokens": 24,
    "temperature": 0.9,
    "seed": 5,
    "ignore_eos": True,
}


def length(prompt: str, text: str) -> float:
    """A scorer that likes long texts."""
    return float(len(text))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = make_tiny(tmp_path_factory.mktemp("steps") / "tiny")
    model = forerun.load(folder, dtype="fp32", max_seqs=40)
    model.generate("one", max_new_tokens=2)  # a controller may measure passes, once
    return model


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Any:
    return METHODS[request.param]


@pytest.mark.parametrize("drafter", ["none", "stand"])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_no_stem_is_computed_twice(model: Model, method: Any, batch: int, drafter: str) -> None:
    """Rows: the prompt but its last token, then one for every pass and every drafted node.

    Fewer where several run at once that still say the same.
    """
    for slot in model.target.cache.slots:
        slot.truncate(0)
    before = model.target.num_rows
    found = method(model, PROMPT, scorer=length, n=8, width=4, batch=batch, drafter=drafter, **FEW)
    rows = model.target.num_rows - before
    prompt = len(model.tokenizer.encode(PROMPT))
    assert len(found.tree) > 20
    most = prompt - 1 + found.stats.passes + found.stats.drafted
    assert rows == most if batch == 1 else most // 2 < rows <= most


def test_n_grams_of_pruned_branches_stay_in_the_memory(model: Model, method: Any) -> None:
    drafter = Stand()
    seen: list[int] = []

    def listen(step: Any) -> None:
        seen.append(drafter.memory(step.seqs[0]).observed)

    options = FEW | {"controller": "fixed:nodes=4"}  # what is not drafted for teaches nothing
    found = method(
        model, PROMPT, scorer=length, n=8, width=4, drafter=drafter, on_step=listen, **options
    )
    assert any(branch.fate == "pruned" for branch in found.tree)
    assert seen[-1] == found.stats.generated  # one memory, every token of every branch
    assert drafter.memory_report()["logit memory"] == 0  # and nothing is left behind


def test_the_tree_is_whole(model: Model, method: Any) -> None:
    found = method(model, PROMPT, scorer=length, n=8, width=4, **FEW)
    assert [branch.number for branch in found.tree] == list(range(len(found.tree)))
    num_prompt = len(found.tree[0].tokens)
    for branch in found.tree[1:]:
        parent = branch.parent
        new = branch.tokens[len(parent.tokens) :]
        assert branch.tokens[: len(parent.tokens)] == parent.tokens and 1 <= len(new) <= 6
        assert branch.text == model.tokenizer.decode(branch.tokens[num_prompt:])
        if branch.text.startswith(parent.text):  # else a step ended within a character
            assert branch.text == parent.text + branch.step
        assert branch.depth == parent.depth + 1
        if len(new) < 6 and not branch.finish:
            assert " " in branch.step.lstrip()
        assert branch.score == len(branch.text) and len(branch.scores) == branch.depth
    assert found.chosen in found.finished
    assert all(len(b.tokens) - num_prompt == 24 for b in found.finished)
    assert sum(len(b.tokens) - len(b.parent.tokens) for b in found.tree[1:]) == (
        found.stats.generated
    )


def test_beam_keeps_the_best_of_all_and_dvts_one_of_each_tree(model: Model) -> None:
    beam = step_beam(model, PROMPT, scorer=length, n=8, width=4, **FEW)
    trees = dvts(model, PROMPT, scorer=length, n=8, width=4, **FEW)
    for found, per_round in ((beam, 2), (trees, 2)):
        stems = Counter((b.parent.depth) for b in found.tree[1:] if b.parent.depth)
        assert max(stems.values()) <= per_round * 4
    first = [b for b in beam.tree if b.depth == 1]
    assert len(first) == 8
    kept = {b.number for b in by_rank(first)[:2]}
    assert {b.parent.number for b in beam.tree if b.depth == 2} <= kept
    for group in (0, 1):
        own = [b for b in trees.tree if b.depth == 1 and b.group == group]
        assert len(own) == 4
        stems = {b.parent.number for b in trees.tree if b.depth == 2 and b.group == group}
        assert stems <= {by_rank(own)[0].number}


def test_of_equals_the_children_of_other_stems_come_first(model: Model) -> None:
    found = step_beam(model, PROMPT, scorer=lambda p, t: 1.0, n=8, width=4, **FEW)
    second = [b for b in found.tree if b.depth == 2]
    kept = {b.parent for b in found.tree if b.depth == 3}
    assert {b.parent for b in second} == {b.parent for b in kept}


def test_a_step_without_its_delimiter_ends_at_the_limit(model: Model, method: Any) -> None:
    found = method(model, PROMPT, scorer=length, n=2, width=1, **FEW | {"step_end": "@@@"})
    assert [len(b.tokens) - len(b.parent.tokens) for b in found.tree[1:]] == [6] * 8


def test_a_failing_scorer_drops_that_branch_and_the_search_goes_on(
    model: Model, method: Any
) -> None:
    calls = 0

    def fails(prompt: str, text: str) -> float:
        nonlocal calls
        calls += 1
        if len(text) % 7 == 0:
            raise ValueError("not this one")
        return math.nan if len(text) % 11 == 0 else 1.0

    few = FEW | {"drafter": "none"}  # drafts change with measured costs, and texts with drafts
    found = method(model, PROMPT, scorer=fails, n=8, width=4, **few)
    lost = [branch for branch in found.tree if branch.fate == "lost"]
    assert lost and all(len(b.text) % 7 == 0 or len(b.text) % 11 == 0 for b in lost)
    assert not any(branch.parent in lost for branch in found.tree)
    assert sum("dropped" in note for note in found.notes) == len(lost)
    assert found.chosen not in lost


def test_all_branches_lost_is_an_error_with_the_partial_tree(model: Model, method: Any) -> None:
    def deep(prompt: str, text: str) -> float:
        return 1.0 if len(text) < 12 else math.inf

    with pytest.raises(BranchesLost, match=r"failed on all \d+ branches .*inf") as caught:
        method(model, PROMPT, scorer=deep, n=4, width=2, **FEW)
    assert len(caught.value.tree) > 4
    assert caught.value.tree[-1].fate == "lost"


def test_too_few_steps_is_said(model: Model, method: Any) -> None:
    found = method(model, PROMPT, scorer=length, n=4, width=2, max_steps=2, **FEW)
    assert max(branch.depth for branch in found.tree) == 2
    assert found.chosen.finish is None and "unfinished" in found.notes[-1]


def test_aggregates_of_step_scores(model: Model) -> None:
    for name, rule in {"min": min, "mean": lambda s: sum(s) / len(s), "product": math.prod}.items():
        found = dvts(model, PROMPT, scorer=length, n=4, width=2, aggregate=name, **FEW)
        assert all(b.score == pytest.approx(rule(b.scores)) for b in found.tree[1:])


def test_scores_that_are_too_large_together_drop_the_branch(model: Model, method: Any) -> None:
    def found(aggregate: str) -> Any:
        scores = itertools.cycle((1e300, 1.0, 0.5))
        return method(
            model, PROMPT, scorer=lambda prompt, text: next(scores), n=8, width=4,
            aggregate=aggregate, **FEW,
        )  # fmt: skip

    product, mean = found("product"), found("mean")
    lost = [branch for branch in product.tree if branch.fate == "lost"]
    assert lost and all(math.prod(branch.parent.scores) == 1e300 for branch in lost)
    assert math.isfinite(product.chosen.score)
    assert any("the product of its scores is not finite" in n for n in product.notes)
    assert all(branch.fate != "lost" and math.isfinite(branch.score) for branch in mean.tree[1:])


def test_a_parser_that_raises_leaves_the_tree(model: Model, method: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        method(model, PROMPT, scorer=length, n=4, parse=lambda text: str(1 / 0), **FEW)
    assert len(caught.value.tree) > 4


def test_negative_scores_cannot_weigh_votes(model: Model) -> None:
    found = dvts(model, PROMPT, scorer=lambda p, t: -len(t), n=4, width=2, **FEW)
    assert "selecting by score" in found.notes[-1]
    assert found.chosen.score == max(b.score for b in found.finished)


def test_likelihood_is_a_scorer_too(model: Model) -> None:
    from forerun.search._scorers import Likelihood

    found = dvts(model, PROMPT, scorer=Likelihood(), n=4, width=2, select="score", **FEW)
    chosen, prompt = found.chosen, len(found.tree[0].tokens)
    assert len(chosen.logprobs) == len(chosen.tokens) - prompt
    assert chosen.score == pytest.approx(sum(chosen.logprobs) / len(chosen.logprobs))


def test_kept_cells_give_way_where_memory_is_short(
    model: Model, method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.runner import kv_cache

    small = forerun.load(make_tiny(tmp_path / "small"), dtype="fp32", max_seqs=40)
    options = FEW | {"n": 8, "width": 4, "drafter": "none", "scorer": length}
    wanted = method(model, PROMPT, **options)
    layers, _, _, *cell = small.target.cache.data.shape
    monkeypatch.setattr(
        kv_cache, "available_bytes", lambda device: 3 * 256 * layers * math.prod(cell) * 4
    )
    found = method(small, PROMPT, **options)
    assert [b.tokens for b in found.tree] == [b.tokens for b in wanted.tree]
    assert any("at most" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 6, "width": 4}, "multiple of width.*try n=4"),
        ({"n": 0}, "n must be a whole number from 1 to 65536, got 0"),
        ({"step_tokens": 0}, "step_tokens must be at least 1"),
        ({"step_end": ""}, "step_end must be one or more texts"),
        ({"step_end": ()}, "step_end must be one or more texts"),
        ({"aggregate": "lst"}, "did you mean 'last'"),
        ({"select": "scor"}, "did you mean 'score'"),
        ({"scorer": 7}, "must be a callable"),
    ],
    ids=str,
)
def test_bad_options(model: Model, method: Any, options: dict, said: str) -> None:
    with pytest.raises((ConfigError, UnknownName), match=said):
        method(model, PROMPT, **{"scorer": length, **FEW, **options})


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Ann: 3 * 12 = 36 pens.", 1.0),
        ("Ann: 3 x 12 = 30 + 6 = 36 pens. Then 36 - 5 = 31.\nAnswer: 31", 1.0),
        ("Ann: 3 times 12 is 36.", 1.0),
        ("Ann: 3 * 12 = 37 pens.", 0.1),
        ("Ann: 3 * 12 = 37 pens. Wait, that is not right: 3 * 12 = 36.", 0.9),
        ("Ann: 3 * 13 = 39 pens.", 0.3),
        ("Ann has 14 pens.", 0.5),
        ("Half of it: 36 / 2 = 18.", 0.3),  # 36 came from nowhere
        ("Ann: 3 * 12 = 36.\nAnswer: 35", 0.1),
        ("Ann has 3 boxes", 1.0),
        ("1/0 = 3, (((", 1.0),  # nothing that could be computed again
    ],
)
def test_the_step_checker_needs_no_answer(text: str, score: float) -> None:
    prompt = "Ann has 3 boxes with 12 pens each, and twice loses 5."
    assert arithmetic(prompt, text) == pytest.approx(score)


def test_the_step_checker_accepts_reference_solutions() -> None:
    from forerun.tasks.reasoning import ReasoningTask

    task = ReasoningTask("heldout", seed=4)
    scores = [arithmetic(e.prompt, e.reference) for e in map(task.example, range(200))]
    assert min(scores) > 0.5  # mistakes that are put right cost little
    assert sum(score == 1.0 for score in scores) > 120
    wrong = [arithmetic(e.prompt, e.reference + "1") for e in map(task.example, range(50))]
    assert max(wrong) <= 0.1


def test_values_and_numbers() -> None:
    assert value("(200 + 80 + 10) / 2") == 145
    assert value("2 ** 9") is None and value("__import__") is None and value("1 / 0") is None
    assert numbers("a third of 1,200, or 2.5") == {3, 1200, value("2.5")}


@pytest.mark.parametrize("given", [Sampling(logprobs=5), [Sampling(logprobs=5)]])
def test_log_probabilities_that_are_asked_for_are_more_than_the_search_needs(
    model: Model, given: Any
) -> None:
    session = Session(model, "1+1=", given, needs_logprobs=True)
    assert session.pattern.sampling.logprobs == 5
    assert Session(model, "1+1=", None, needs_logprobs=True).pattern.sampling.logprobs == 0
    session = Session(model, "1+1=", None, needs_logprobs=True, logprobs=3)
    assert session.pattern.sampling.logprobs == 3
