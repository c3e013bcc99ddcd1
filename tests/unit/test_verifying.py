"""`verify` passes what is lossless and catches what is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tiny import make_tiny

import forerun
from forerun import verifying
from forerun.dice import Dice
from forerun.engine.api import Model
from forerun.records import Verdict
from forerun.roles import Verifier
from forerun.sampling import Sampling
from forerun.shaping import Laws
from forerun.tree import Tree
from forerun.verifying import GreedyCase, LawReport, LawTest, Parts

PROMPTS = ["the cat sat on", "one two three"]
DRAFTERS = [
    "none",
    "stand",
    "stand:stochastic=false",
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

    def verify(self, tree: Tree, laws: Laws, dice: Dice) -> Verdict:
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

    def verify(self, tree: Tree, laws: Laws, dice: Dice) -> Verdict:
        children = tree.children(-1)[:1]
        node = children[0] if children else -1
        return Verdict(children, int(np.argmax(laws.logits(node))))


@pytest.mark.parametrize("spec", DRAFTERS)
def test_lossless_drafters_pass(model: Model, draft: Path, spec: str) -> None:
    parts = Parts(spec.format(draft=draft))
    cases = list(verifying.check_greedy(model, PROMPTS, parts, max_new_tokens=24))
    assert len(cases) == 4 and all(case.passed for case in cases)
    assert all(case.noise < 1e-4 for case in cases)
    report = verifying.check_law(
        model, PROMPTS[:1], parts, Sampling(seed=1), num_samples=400, batch=8
    )
    assert report.num_samples == 400 and report.tests and report.passed
    assert report.is_vacuous == (spec in ("none", "prompt_lookup"))


@pytest.mark.parametrize("sampling", [Sampling(top_k=4), Sampling(temperature=0.5, top_p=0.8)])
def test_law_is_the_processed_one(model: Model, sampling: Sampling) -> None:
    report = verifying.check_law(model, PROMPTS[:1], Parts(), sampling, num_samples=300, batch=8)
    assert report.tests and report.passed and report.stats.accepted


def test_biased_verifier_fails_the_law(model: Model) -> None:
    report = verifying.check_law(
        model, PROMPTS[:1], Parts(verifier=Eager()), Sampling(seed=3), num_samples=600, batch=8
    )
    assert not report.passed and report.stats.accepted


def test_wrong_greedy_verifier_fails_identity(model: Model) -> None:
    cases = list(verifying.check_greedy(model, PROMPTS, Parts(verifier=Gullible())))
    bad = [case for case in cases if not case.passed]
    assert bad and all(case.cause == "violation" for case in bad)
    assert all(case.gap > 2 * case.difference for case in bad)


def test_divergence_names_position_and_gap(model: Model) -> None:
    (first, *_) = verifying.check_greedy(model, PROMPTS, Parts(verifier=Gullible()))
    plain = model.generate(PROMPTS[0], temperature=0, drafter="none", max_new_tokens=64)[0]
    assert first.position is not None
    assert first.expected == plain.samples[0].tokens[first.position] != first.got


def test_early_end_is_a_violation() -> None:
    tops = [(np.arange(2), np.array([2.0, 1.0]))] * 3
    case = GreedyCase(0, 0, 2, 0, 0.0)
    cut = verifying._compare(case, [0, 0, 0], [0, 0], tops, tops, 1e-4)
    assert not cut.passed and cut.position == 2


def test_tie_needs_a_small_gap_and_a_difference_that_explains_it() -> None:
    def case(gap: float, difference: float) -> GreedyCase:
        return GreedyCase(0, 0, 8, 0, 0.0, 3, 1, 2, gap=gap, difference=difference, tolerance=1e-3)

    assert case(1e-4, 1e-4).is_tie and case(1e-4, 1e-4).passed
    assert not case(1e-4, 0.0).passed  # rounding did not do it
    assert not case(0.5, 0.4).passed  # too large for rounding: the tree pass is wrong


def test_next_law_follows_the_text_so_far(model: Model) -> None:
    prompt = model.tokenizer.encode(PROMPTS[0])
    plain = verifying.next_law(model, prompt, [5], Sampling())
    shown = verifying.next_law(model, [*prompt, 5], [], Sampling())
    penalised = verifying.next_law(model, prompt, [5], Sampling(presence_penalty=2.0))
    assert plain.sum() == pytest.approx(1) and np.abs(plain - shown).max() < 1e-6
    assert penalised[5] < plain[5]


def test_chi_square_agrees_with_scipy() -> None:
    law = np.array([0.4, 0.3, 0.2, 0.1])
    counts = np.array([50, 20, 20, 10])
    statistic, bins, p_value = verifying.chi_square(counts, law)
    expected = stats.chisquare(counts, 100 * law)
    assert (statistic, bins) == (pytest.approx(expected.statistic), 4)
    assert p_value == pytest.approx(expected.pvalue)


def test_chi_square_pools_rare_tokens_and_refuses_impossible_ones() -> None:
    law = np.array([0.5, 0.4, 0.06, 0.04, 0.0])
    assert verifying.chi_square(np.array([50, 40, 6, 4, 0]), law)[:2] == (0.0, 3)
    rare = np.array([0.98, 0.01, 0.01])
    assert verifying.chi_square(np.array([98, 1, 1]), rare)[1:] == (1, 1.0)
    assert verifying.chi_square(np.array([50, 40, 6, 3, 1]), law)[2] == 0.0


def test_p_values_are_uniform_under_the_law() -> None:
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.ones(20))
    draws = rng.multinomial(2000, law, size=500)
    p_values = [verifying.chi_square(counts, law)[2] for counts in draws]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_holm_by_hand() -> None:
    tests = [LawTest(0, (), 100, 5, 1.0, p) for p in (0.04, 0.01, 0.03)]
    assert [t.corrected for t in verifying.holm(tests)] == pytest.approx([0.06, 0.03, 0.06])


def test_report_without_accepted_drafts_is_vacuous() -> None:
    assert LawReport([], 0).passed and LawReport([], 0).is_vacuous


def test_tolerance_knows_the_number_type(model: Model, folder: Path) -> None:
    assert verifying.dtype_of(model) is torch.float32
    assert verifying.dtype_of(forerun.load(str(folder), dtype="bf16")) is torch.bfloat16
