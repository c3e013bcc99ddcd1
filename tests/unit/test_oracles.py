"""Exact numbers for one position: acceptance and residuals of every simple rule, by enumeration."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chisquare

from forerun.core.dice import Dice, EnumeratedDice, SeededDice
from forerun.core.records import Plan, Sequence, Verdict
from forerun.core.roles import Verifier
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import IID, POINT, SWOR, Proposal, Tree, TreeBuilder
from forerun.core.tree_template import grid
from forerun.drafters.stand import Stand
from forerun.verifiers.base import residual
from forerun.verifiers.match import Match
from forerun.verifiers.recursive import Recursive
from forerun.verifiers.speculative import Speculative

A = ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 2)
B = ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], 2)
C = (*B[:2], 3)
D = ([0.6, 0.2, 0.1, 0.05, 0.05], [0.35, 0.3, 0.2, 0.1, 0.05], 2)
CASES = {"A": A, "B": B, "C": C, "D": D}


class OnePosition(dict):
    """The same law at the root and below every child."""

    sampling = Sampling()

    def __init__(self, p: np.ndarray) -> None:
        super().__init__(dict.fromkeys(range(-1, 16), p))


def iid(q: Proposal, k: int, dice: Dice) -> Tree:
    tree = TreeBuilder()
    for _ in range(k):
        tree.add(int(q.ids[dice.choice(q.probs)]), -1, IID, q)
    return tree.build()


def swor(q: Proposal, k: int, dice: Dice) -> Tree:
    tree = TreeBuilder()
    for i in dice.without_replacement(q.probs, k):
        tree.add(int(q.ids[i]), -1, SWOR, q)
    return tree.build()


def outcomes(
    p: list[float], draw: Callable[[Dice], Tree], verifier: Verifier
) -> tuple[float, np.ndarray, list[tuple[Tree, Verdict, float]]]:
    """(acceptance at the root, law of the first token, every outcome)."""
    law, accepted, runs = np.zeros(len(p)), 0.0, []

    def program(dice: EnumeratedDice) -> tuple[Tree, Verdict]:
        tree = draw(dice)
        return tree, verifier.verify(tree, OnePosition(np.array(p)), dice)

    for (tree, verdict), probability in EnumeratedDice().outcomes(program):
        law[verdict.tokens(tree)[0]] += probability
        accepted += probability * bool(verdict.nodes)
        runs.append((tree, verdict, probability))
    return accepted, law, runs


def acceptance(p: list[float], q: list[float], k: int, draw: Callable, verifier: Verifier) -> float:
    """Acceptance at one position; the law of what is emitted must be p on the way."""
    proposal = Proposal.of(np.array(q))
    accepted, law, _ = outcomes(p, lambda dice: draw(proposal, k, dice), verifier)
    np.testing.assert_allclose(law, p, atol=1e-12)
    return accepted


TABLE = [
    ("single draft", iid, Recursive, 1, (0.7, 0.6, 0.6, 0.75)),
    ("naive", iid, Match, None, (0.483, 0.35, 0.4646, 0.498875)),
    ("with replacement", iid, Recursive, None, (0.76, 0.72, 0.768, 0.8375)),
    (
        "without replacement",
        swor,
        Recursive,
        None,
        (0.82, 0.764285714286, 0.840297619048, 0.863194444444),
    ),
]


@pytest.mark.parametrize(
    ("rule", "draw", "verifier", "k", "values"), TABLE, ids=[row[0] for row in TABLE]
)
def test_one_position_table(
    rule: str, draw: Callable, verifier: type, k: int | None, values: tuple[float, ...]
) -> None:
    for (p, q, own_k), value in zip(CASES.values(), values, strict=True):
        assert acceptance(p, q, k or own_k, draw, verifier()) == pytest.approx(value, abs=1e-12)


def test_single_draft_acceptance_is_the_overlap() -> None:
    for p, q, _ in CASES.values():
        overlap = np.minimum(p, q).sum()
        for draw in (iid, swor):
            assert acceptance(p, q, 1, draw, Recursive()) == pytest.approx(overlap, abs=1e-12)


def test_naive_acceptance_formula() -> None:
    for p, q, k in CASES.values():
        formula = (np.array(p) * (1 - (1 - np.array(q)) ** k)).sum()
        assert acceptance(p, q, k, iid, Match()) == pytest.approx(formula, abs=1e-12)


def test_rounds_with_replacement_multiply() -> None:
    p, q = np.array(A[0]), np.array(A[1])
    rounds, law = [], p
    for _ in range(2):
        rounds.append(np.minimum(law, q).sum())
        law = residual(law, q)
    np.testing.assert_allclose(rounds, [0.7, 0.2], atol=1e-12)
    assert 1 - np.prod(1 - np.array(rounds)) == pytest.approx(0.76, abs=1e-12)


@pytest.mark.parametrize(("case", "shares"), [(A, (0.7, 0.12)), (B, (0.6, 0.164285714286))])
def test_rounds_without_replacement_contribute(case: tuple, shares: tuple[float, float]) -> None:
    """Hand check of A: reject token 2 (.5 x .6 = .3), then q = [.4, .6, 0] against [1, 0, 0]."""
    p, q, k = case
    _, _, runs = outcomes(p, lambda dice: swor(Proposal.of(np.array(q)), k, dice), Recursive())
    by_round = [
        sum(weight for _, verdict, weight in runs if verdict.nodes[:1] == [child])
        for child in range(2)
    ]
    np.testing.assert_allclose(by_round, shares, atol=1e-12)
    if case is A:
        np.testing.assert_allclose(residual(np.array(p), np.array(q)), [1, 0, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("token", "share", "left"),
    [(0, 0.5, [0, 0.6, 0.4]), (1, 0.3, [5 / 7, 0, 2 / 7]), (2, 0.2, [0.625, 0.375, 0])],
)
def test_one_hot_draft(token: int, share: float, left: list[float]) -> None:
    tree = TreeBuilder()
    tree.add(token, -1, POINT)
    for verifier in (Recursive(), Match()):
        accepted, law, runs = outcomes(A[0], lambda dice: tree.build(), verifier)
        assert accepted == pytest.approx(share, abs=1e-12)
        np.testing.assert_allclose(law, A[0], atol=1e-12)
        rejected = np.zeros(3)
        for _, verdict, weight in runs:
            rejected[verdict.token] += 0 if verdict.nodes else weight
        np.testing.assert_allclose(rejected / rejected.sum(), left, atol=1e-12)


def test_wrong_labels_have_the_bias_that_the_theory_predicts() -> None:
    """Draws without replacement judged by the q of the first draw, and a child pruned by value."""

    def mislabelled(dice: Dice) -> Tree:
        q, tree = Proposal.of(np.array([0.3, 0.1, 0.3, 0.3])), TreeBuilder()
        for i in dice.without_replacement(q.probs, 2):
            tree.add(int(q.ids[i]), -1, IID, q)
        return tree.build()

    def pruned(dice: Dice) -> Tree:
        q, tree = Proposal.of(np.array([0.2, 0.5, 0.3])), TreeBuilder()
        token = dice.choice(q.probs)
        if q.probs[token] >= 0.3:
            tree.add(token, -1, IID, q)
        return tree.build()

    biased = outcomes([0.45, 0.35, 0.1, 0.1], mislabelled, Recursive())[1]
    np.testing.assert_allclose(biased, [0.493, 0.307, 0.1, 0.1], atol=1e-3)
    biased = outcomes([0.5, 0.3, 0.2], pruned, Recursive())[1]
    np.testing.assert_allclose(biased, [0.4, 0.36, 0.24], atol=1e-12)


@pytest.mark.parametrize(
    ("temperature", "both", "target_only"),
    [(0.5, 0.447368, 0.542105), (1, 0.7, 0.7), (2, 0.847305, 0.762751)],
)
def test_temperature_of_target_and_draft(
    temperature: float, both: float, target_only: float
) -> None:
    sampling = Sampling(temperature=temperature)
    p, q = (to_probs(np.log(np.array(law)), sampling) for law in A[:2])
    assert acceptance(p, q, 1, iid, Recursive()) == pytest.approx(both, abs=1e-6)
    assert acceptance(p, A[1], 1, iid, Recursive()) == pytest.approx(target_only, abs=1e-6)


def test_top_k_of_target_and_draft() -> None:
    sampling = Sampling(top_k=2)
    p, q = (to_probs(np.log(np.array(law)), sampling) for law in A[:2])
    np.testing.assert_allclose(p, [0.625, 0.375, 0], atol=1e-12)
    np.testing.assert_allclose(q, [0, 0.375, 0.625], atol=1e-12)
    assert acceptance(p, q, 1, iid, Recursive()) == pytest.approx(0.375, abs=1e-12)
    np.testing.assert_allclose(residual(p, q), [1, 0, 0], atol=1e-12)
    assert acceptance(p, A[1], 1, iid, Recursive()) == pytest.approx(0.5, abs=1e-12)
    np.testing.assert_allclose(residual(p, np.array(A[1])), [0.85, 0.15, 0], atol=1e-12)


# STAND: the same through the drafter itself, whose memory holds q as float32


def stand_acceptance(p: list[float], q: list[float], k: int, **options: object) -> float:
    """Acceptance with k children from a memory that holds q; the law must stay p exactly."""
    drafter = Stand(template=grid(k), **options)  # type: ignore[arg-type]

    def draw(dice: Dice) -> Tree:
        seq = Sequence([7, 8], 2, Sampling(), dice, limit=10, group=0)
        memory = drafter.memory(seq)
        if not len(memory):
            memory.update(seq.tokens, range(len(q)), q)
        return drafter.propose([seq], [Plan(nodes=k, depth=1)], [seq.dice])[0]

    accepted, law, _ = outcomes(p, draw, Speculative())
    np.testing.assert_allclose(law, p, atol=1e-12)
    return accepted


P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
STAND_CASES = [
    (P, Q, "sampled", (0.7, 0.808571428571, 1.0)),
    (P, Q, "top", (0.3, 0.5, 1.0)),
    (P, P, "sampled", (1.0, 1.0, 1.0)),
    (P, P, "top", (0.5, 0.8, 1.0)),
    ([0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.3, 0.0], "sampled", (0.6, 0.689285714286, 0.9)),
    ([0.9, 0.05, 0.05], [0.4, 0.3, 0.3], "sampled", (0.5, 0.785714285714)),
    ([0.9, 0.05, 0.05], [0.4, 0.3, 0.3], "top", (0.9, 0.95)),
]


@pytest.mark.parametrize(("p", "q", "choice", "values"), STAND_CASES)
def test_stand_acceptance(
    p: list[float], q: list[float], choice: str, values: tuple[float, ...]
) -> None:
    for k, value in enumerate(values, start=1):
        assert stand_acceptance(p, q, k, choice=choice) == pytest.approx(value, abs=1e-6)
    if choice == "sampled":
        overlap = np.minimum(p, q).sum()
        assert stand_acceptance(p, q, 1) == pytest.approx(overlap, abs=1e-6)


def test_order_of_draws_is_plackett_luce() -> None:
    """The fast path draws (a, b) with probability q_a q_b / (1 - q_a)."""
    q = np.array([0.1, 0.2, 0.3, 0.4])
    drafter, dice = Stand(template=grid(2)), SeededDice(11)
    seq = Sequence([7, 8], 2, Sampling(), dice, limit=10, group=0)
    drafter.memory(seq).update(seq.tokens, range(4), q)
    counts = np.zeros((4, 4))
    for _ in range(40_000):
        first, second = drafter.propose([seq], [Plan(nodes=2, depth=1)], [seq.dice])[0].tokens
        counts[first, second] += 1
    expected = q[:, None] * q[None, :] / (1 - q[:, None])
    apart = ~np.eye(4, dtype=bool)
    assert not counts.diagonal().any()
    assert chisquare(counts[apart], 40_000 * expected[apart]).pvalue > 1e-3
