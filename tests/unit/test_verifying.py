"""`verify` passes what is lossless and catches what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_tiny

import forerun
from forerun.api import Model
from forerun.core import logits as shaping
from forerun.core import sampling as sampling_module
from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Rows, Verdict
from forerun.core.roles import Verifier
from forerun.core.sampling import Sampling, softmax
from forerun.core.tree import Tree
from forerun.lossless import distribution, greedy
from forerun.lossless.distribution import LawReport, LawTest
from forerun.lossless.greedy import GreedyCase, Parts
from forerun.runner.attention import Span
from forerun.runner.forward_batch import Work
from forerun.runner.kv_cache import Cache
from forerun.runner.native import kernels
from forerun.verifiers.speculative import Speculative

PROMPTS = ["the cat sat on", "one two three"]
DRAFTERS = [
    "none",
    "stand",
    "stand:choice=top",
    "prompt_lookup",
    "fuse:parts=prompt_lookup+stand",
    "draft_model:model={draft}",
    "draft_model:model={draft},grower=gumbel",
    "draft_model:model={draft},grower=iid",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("draft"), seed=1)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return forerun.load(str(folder), dtype="fp32", max_seqs=16)


class Eager(Verifier):
    """Wrong on purpose: accepts a draft with twice its probability, then draws from p."""

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        node, kept = -1, []
        while True:
            p = laws[node]
            for child in tree.children(node):
                x, q = tree.tokens[child], tree.proposal(child, len(p))
                if dice.coin(min(1.0, 2 * p[x] / q[x])):
                    node = child
                    kept.append(child)
                    break
            else:
                return Verdict(kept, dice.choice(p))


class Gullible(Verifier):
    """Wrong on purpose: takes the first child without looking at the law."""

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        children = tree.children(-1)[:1]
        node = children[0] if children else -1
        return Verdict(children, int(np.argmax(laws.logits(node))))


class Late(Speculative):
    """Wrong on purpose, yet only behind an accepted draft: draws the likeliest token there."""

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        verdict = super().verify(tree, laws, dice)
        if not verdict.nodes:
            return verdict
        return Verdict(verdict.nodes, int(np.argmax(laws[verdict.nodes[-1]])))


@pytest.mark.parametrize("spec", DRAFTERS)
def test_lossless_drafters_pass(model: Model, draft: Path, spec: str) -> None:
    parts = Parts(spec.format(draft=draft))
    cases = list(greedy.check_greedy(model, PROMPTS, parts, max_new_tokens=24))
    assert len(cases) == 4 and all(case.passed for case in cases)
    assert all(case.noise < 1e-4 for case in cases)
    report = distribution.check_law(
        model, PROMPTS[:1], parts, Sampling(seed=1), num_samples=400, batch=8
    )
    assert report.num_samples == 400 and report.tests and report.passed
    assert report.is_vacuous == (spec in ("none", "prompt_lookup"))


def test_every_position_is_tested_at_any_number_of_samples(model: Model) -> None:
    report = distribution.check_law(
        model, PROMPTS[:1], Parts(), Sampling(seed=1), num_samples=100, num_tokens=4, batch=8
    )
    assert [test.position for test in report.tests] == [0, 1, 2, 3]
    assert all(test.num_samples >= 95 for test in report.tests)
    drafted = [test.num_drafted for test in report.tests]
    assert drafted[0] == 0 < drafted[1] and drafted == sorted(drafted)


def unmoved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: accepted nodes stay in their scratch cells."""
    monkeypatch.setattr(Cache, "move", lambda *_: None)


def seen_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every node sees its siblings and their children."""
    real = Work.span

    def blind(work: Work) -> Span:
        span, num = real.fget(work), len(work.pending)
        if span.sees is None:
            return span
        sees = span.sees.copy()
        sees[num:, num:] = span.places[num:, None] >= span.places[num:]
        return replace(span, sees=sees)

    monkeypatch.setattr(Work, "span", property(blind))


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Passes run on torch: masks are its own, and rows depend on their company."""
    monkeypatch.setenv("FORERUN_NATIVE", "off")
    kernels.cache_clear()
    yield
    kernels.cache_clear()


@pytest.mark.usefixtures("on_torch")
@pytest.mark.parametrize("plant", [unmoved, seen_by_all])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_planted_faults_fail_though_texts_agree(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, plant: Callable[..., None]
) -> None:
    plant(monkeypatch)
    model = forerun.load(str(folder), dtype=dtype)
    cases = list(greedy.check_greedy(model, PROMPTS, Parts(), max_new_tokens=24))
    # a case whose accepted nodes happen to lie in place already may pass; the verdict may not
    assert not all(case.passed for case in cases)
    assert any(case.cause == "the passes differ" for case in cases)


def test_a_fault_behind_accepted_drafts_fails_the_law(model: Model) -> None:
    report = distribution.check_law(
        model, PROMPTS[:1], Parts(verifier=Late()), Sampling(seed=3), num_samples=400, batch=8
    )
    assert [test.passed for test in report.tests] == [True, False, False]


def test_references_read_no_cell_of_an_earlier_pass(model: Model) -> None:
    prompt = model.tokenizer.encode(PROMPTS[0])
    honest = distribution.next_law(model, prompt, [5], Sampling())
    with torch.inference_mode():
        model.target.cache.data.fill_(1.0)  # type: ignore[attr-defined]
    spoilt = distribution.next_law(model, prompt, [5], Sampling())
    assert np.abs(spoilt - honest).max() > 0.01
    greedy.empty_cache(model)
    anew = distribution.next_law(model, prompt, [5], Sampling())
    assert np.abs(anew - honest).max() < 1e-6


@pytest.mark.usefixtures("on_torch")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_honest_half_precision_passes(folder: Path, dtype: str) -> None:
    model = forerun.load(str(folder), dtype=dtype, max_seqs=16)
    cases = list(greedy.check_greedy(model, PROMPTS, Parts(), max_new_tokens=48))
    assert all(case.passed for case in cases)
    if dtype == "fp16":  # in bf16 rows may happen to keep their bits
        assert any(case.noise > 0 for case in cases)
    report = distribution.check_law(
        model, PROMPTS[:1], Parts(), Sampling(seed=1), num_samples=1000, batch=8
    )
    assert report.passed and not report.is_vacuous


@pytest.mark.parametrize("sampling", [Sampling(top_k=4), Sampling(temperature=0.5, top_p=0.8)])
def test_law_is_the_processed_one(model: Model, sampling: Sampling) -> None:
    report = distribution.check_law(model, PROMPTS[:1], Parts(), sampling, num_samples=300, batch=8)
    assert report.tests and report.passed and report.stats.accepted


def test_biased_verifier_fails_the_law(model: Model) -> None:
    report = distribution.check_law(
        model, PROMPTS[:1], Parts(verifier=Eager()), Sampling(seed=3), num_samples=600, batch=8
    )
    assert not report.passed and report.stats.accepted


def test_wrong_greedy_verifier_fails_identity(model: Model) -> None:
    cases = list(greedy.check_greedy(model, PROMPTS, Parts(verifier=Gullible())))
    bad = [case for case in cases if not case.passed]
    assert bad and all(case.cause == "violation" for case in bad)
    assert all(case.gap > 2 * case.difference for case in bad)


def test_divergence_names_position_and_gap(model: Model) -> None:
    (first, *_) = greedy.check_greedy(model, PROMPTS, Parts(verifier=Gullible()))
    plain = model.generate(PROMPTS[0], temperature=0, drafter="none", max_new_tokens=64)[0]
    assert first.position is not None
    assert first.expected == plain.samples[0].tokens[first.position] != first.got


def test_early_end_is_a_violation() -> None:
    tops = [(np.arange(2), np.array([2.0, 1.0]))] * 3
    case = GreedyCase(0, 0, 2, 0, 0.0)
    cut = greedy._compare(case, [0, 0, 0], [0, 0], tops, tops, 1e-4)
    assert not cut.passed and cut.position == 2


def test_tie_needs_a_small_gap_and_a_difference_that_explains_it() -> None:
    def case(gap: float, difference: float) -> GreedyCase:
        return GreedyCase(0, 0, 8, 0, 0.0, 1e-3, 3, 1, 2, gap=gap, difference=difference)

    assert case(1e-4, 1e-4).is_tie and case(1e-4, 1e-4).passed
    assert not case(1e-4, 0.0).passed  # rounding did not do it
    assert not case(0.5, 0.4).passed  # too large for rounding: the tree pass is wrong


def test_next_law_follows_the_text_so_far(model: Model) -> None:
    prompt = model.tokenizer.encode(PROMPTS[0])
    plain = distribution.next_law(model, prompt, [5], Sampling())
    shown = distribution.next_law(model, [*prompt, 5], [], Sampling())
    penalised = distribution.next_law(model, prompt, [5], Sampling(presence_penalty=2.0))
    assert plain.sum() == pytest.approx(1) and np.abs(plain - shown).max() < 1e-6
    assert penalised[5] < plain[5]


def test_report_without_accepted_drafts_is_vacuous() -> None:
    assert LawReport([], 0).passed and LawReport([], 0).is_vacuous
    assert LawReport([LawTest(0, 1, 5, 100, 0, 3, 1.0, 0.5)], 100).is_vacuous
    assert not LawReport([LawTest(0, 1, 5, 100, 7, 3, 1.0, 0.5)], 100).is_vacuous


def test_tolerance_knows_the_number_type(model: Model, folder: Path) -> None:
    assert greedy.dtype_of(model) is torch.float32
    assert greedy.dtype_of(forerun.load(str(folder), dtype="bf16")) is torch.bfloat16


@pytest.fixture
def rounding_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A bfloat16 model whose tree passes round more coarsely than its plain ones, yet allowed."""
    model = forerun.load(str(folder), dtype="bf16", max_seqs=16)
    real, rng = model.target.forward, np.random.default_rng(0)

    def noisy(batch: Any) -> Any:
        rows = real(batch)
        if not any(len(tree) for tree in batch.trees):
            return rows
        return [Rows(coarse(row.logits), row.hidden) for row in rows]

    def coarse(logits: torch.Tensor) -> torch.Tensor:
        most = 0.4 * greedy.ROUNDING[torch.bfloat16] * logits.abs().max()
        return (logits + most * torch.from_numpy(rng.uniform(-1, 1, logits.shape))).float()

    monkeypatch.setattr(model.target, "forward", noisy)
    return model


CUTS = [Sampling(seed=1, top_k=4), Sampling(seed=1, top_p=0.7), Sampling(seed=1, min_p=0.2)]


@pytest.mark.parametrize("sampling", CUTS, ids=["top_k", "top_p", "min_p"])
def test_a_border_that_rounding_moves_is_no_violation(
    rounding_passes: Model, sampling: Sampling
) -> None:
    report = distribution.check_law(
        rounding_passes,
        PROMPTS,
        Parts(),
        sampling,
        num_samples=200,
        num_tokens=2,
        batch=8,
    )
    assert report.passed and not report.is_vacuous
    assert sum(test.num_border for test in report.tests) > 10


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ({"top_k": 4}, {"top_k": 5}),
        ({"top_k": 4}, {"top_k": 3}),
        ({"top_p": 0.7}, {"top_p": 0.9}),
        ({"top_p": 0.7}, {"top_p": 0.4}),
        ({"min_p": 0.2}, {"min_p": 0.02}),
        ({"top_k": 4, "top_p": 0.7}, {"top_k": 0}),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()),
)
def test_a_sampler_that_cuts_elsewhere_still_fails(
    rounding_passes: Model, monkeypatch: pytest.MonkeyPatch, asked: dict, wrong: dict
) -> None:
    real = sampling_module.to_probs
    monkeypatch.setattr(shaping, "to_probs", lambda logits, s: real(logits, replace(s, **wrong)))
    report = distribution.check_law(
        rounding_passes,
        PROMPTS,
        Parts(),
        Sampling(seed=2, **asked),
        num_samples=200,
        num_tokens=2,
        batch=8,
    )
    assert not report.passed


class Uncut(Speculative):
    """Wrong on purpose: the token after the draft comes from the law before top-k and top-p."""

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        verdict = super().verify(tree, laws, dice)
        node = verdict.nodes[-1] if verdict.nodes else -1
        return Verdict(verdict.nodes, dice.choice(softmax(laws.logits(node))))


@pytest.mark.parametrize("verifier", [Uncut(), Late(), Eager()], ids=lambda v: type(v).__name__)
def test_wrong_verifiers_fail_in_half_precision_too(
    rounding_passes: Model, verifier: Verifier
) -> None:
    report = distribution.check_law(
        rounding_passes, PROMPTS[:1], Parts(verifier=verifier), CUTS[1], num_samples=400, batch=8
    )
    assert not report.passed


def test_reports_say_what_they_could_have_found(model: Model) -> None:
    few, many = (
        distribution.check_law(
            model, PROMPTS[:1], Parts(), Sampling(seed=1), num_samples=num, batch=8
        )
        for num in (60, 600)
    )
    assert few.detectable > 1.5 * many.detectable > 0
    assert few.detectable == max(test.detectable for test in few.tests)
    assert LawReport([], 0).detectable == 1.0 and LawReport([], 0).samples_for(0.01) is None


def test_texts_under_a_constraint_are_checked_against_it(model: Model, tmp_path: Path) -> None:
    """The reference is the constrained distribution, and not the model's own."""
    text = tmp_path / "style.txt"
    text.write_text("zzz zz z " * 50)
    spec = f"ngram_style:style={text},strength=1"
    parts = Parts("prompt_lookup", constraint=(spec,))
    (case, again) = greedy.check_greedy(model, ["the cat"], parts, max_new_tokens=12)
    assert case.cause == again.cause == "identical"
    how = {"num_samples": 400, "num_tokens": 2, "batch": 16}
    held = distribution.check_law(model, ["the cat"], parts, Sampling(seed=0), **how)
    assert held.passed and held.tests
    free = model.tokenizer.encode("the cat")
    plain = distribution.next_logits(model, free, [], Sampling())
    shaped = distribution.next_logits(model, free, [], Sampling(), [model.constraint(spec)])
    assert not np.array_equal(plain, shaped)
