"""Drawn children first: law, acceptance, and the kernel against the plain form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from test_speculative import LateDice, TableLaws, random_law, random_tree

from fakes import TableSource, sequence
from forerun.bench.optimum import greedy
from forerun.core.dice import Dice, EnumeratedDice, SeededDice
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.core.tree import POINT, SWOR, Proposal, Tree, TreeBuilder
from forerun.drafters.base import Grown
from forerun.growers.greedy_mix import GreedyMix
from forerun.verifiers.recursive import Recursive
from forerun.verifiers.transport import Transport

A = (np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), 2)
B = (np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4]), 2)
C = (*B[:2], 3)
D = (np.array([0.6, 0.2, 0.1, 0.05, 0.05]), np.array([0.35, 0.3, 0.2, 0.1, 0.05]), 2)
SHEET = [(A, 0.9), (B, 0.766666666667), (C, 0.933333333333), (D, 1.0)]


def drafts(q: np.ndarray, count: int, dice: Dice) -> Tree:
    drafter = Grown(TableSource(lambda tokens: q), GreedyMix(branching=(count,)))
    return drafter.propose([sequence([0], 9, dice)], [Plan(count, 1)], [dice])[0]


def top_first(q: np.ndarray, count: int, dice: Dice) -> Tree:
    """The same drafts in the order of the paper: the drawn one last, as one without replacement."""
    tree, top = TreeBuilder(), np.argsort(-q)[: count - 1]
    for token in top:
        tree.add(token)
    rest = q.copy()
    rest[top] = 0.0
    tree.add(dice.choice(rest), -1, SWOR, Proposal.of(q))
    return tree.build()


def enumerated(p: np.ndarray, q: np.ndarray, count: int, draw, verifier):
    """The emitted law, and how often a draft was accepted."""
    laws = TableLaws(dict.fromkeys(range(-1, 9), p))

    def program(dice: EnumeratedDice) -> tuple[int, bool]:
        tree = draw(q, count, dice)
        verdict = verifier.verify(tree, laws, dice)
        return verdict.tokens(tree)[0], bool(verdict.nodes)

    law, kept = np.zeros(len(p)), 0.0
    for (token, is_kept), weight in EnumeratedDice().outcomes(program):
        law[token] += weight
        kept += weight * is_kept
    return law, kept


@pytest.mark.parametrize(("case", "expected"), SHEET)
def test_sheet(case, expected: float) -> None:
    for draw, verifier in itertools.product((drafts, top_first), (Transport(), Recursive())):
        law, kept = enumerated(*case, draw, verifier)
        np.testing.assert_allclose(law, case[0], atol=1e-12)
        if draw is drafts or isinstance(verifier, Transport):
            assert kept == pytest.approx(expected, abs=1e-9)


def test_order_matters_to_recursive_rejection() -> None:
    """In A the chosen token first: .2 + sum min(p, .8 (.4, .6, 0)) = .2 + .32 + .3."""
    assert enumerated(*A, top_first, Recursive())[1] == pytest.approx(0.82, abs=1e-12)


def test_random_instances_reach_the_optimum_of_their_drafts() -> None:
    rng = np.random.default_rng(4)
    for i in range(60):
        vocab, count = int(rng.integers(2, 7)), 1 + i % 4
        p, q = rng.dirichlet(np.full(vocab, 0.7), 2)
        law, kept = enumerated(p, q, count, drafts, Transport())
        np.testing.assert_allclose(law, p, atol=1e-12)
        assert kept == pytest.approx(greedy(p, q, count), abs=1e-12)


@pytest.mark.parametrize(
    ("dice", "dtype", "vocab"),
    [
        (SeededDice, np.float32, 50),
        pytest.param(SeededDice, np.float64, 50, marks=pytest.mark.slow),
        pytest.param(LateDice, np.float64, 50, marks=pytest.mark.slow),
        (LateDice, np.float64, 5000),  # several blocks, the last one short
    ],
)
def test_kernel_has_the_outcome_of_the_plain_form(dice: type, dtype: type, vocab: int) -> None:
    fast, depths = Transport(), []
    for seed in range(600 if vocab == 50 else 60):
        rng = np.random.default_rng([seed, 9])
        tree = random_tree(rng, vocab)
        laws = TableLaws(
            {
                node: random_law(rng, tree, node, vocab, seed % 4).astype(dtype)
                for node in range(-1, len(tree))
            }
        )
        ours, theirs = dice(seed), dice(seed)
        verdict = fast.verify(tree, laws, ours)
        assert verdict == fast.verify_reference(tree, laws, theirs), seed
        assert ours.uniform() == theirs.uniform()  # and as many uniforms were used
        depths.append(len(verdict.nodes))
    assert max(depths) >= 2 and min(depths) == 0
    assert not any(room[2].any() for room in fast._buffers.values())


def test_a_match_goes_on_below_the_first_node_of_the_token() -> None:
    tree = TreeBuilder()
    first, second = tree.add(1), tree.add(1)
    below = tree.add(0, first)
    tree.add(2, second)
    laws = TableLaws({node: np.eye(3)[1] for node in range(-1, 4)} | {first: np.eye(3)[0]})
    for dice in (SeededDice(0), EnumeratedDice()):
        verdict = Transport().verify(tree.build(), laws, dice)
        assert verdict.nodes == [first, below] and verdict.token == 1


def test_no_drafts_is_a_draw_from_the_target() -> None:
    p = np.array([0.5, 0.3, 0.2])
    for seed in range(50):
        verdict = Transport().verify(TreeBuilder().build(), TableLaws({-1: p}), SeededDice(seed))
        assert verdict.nodes == [] and verdict.token == SeededDice(seed).choice(p)


def test_greedy_follows_the_argmax() -> None:
    class Greedy(TableLaws):
        sampling = Sampling(temperature=0.0)

    dice, likeliest = SeededDice(0), np.array([0.1, 0.2, 0.7])
    tree = drafts(A[1], 2, dice)
    verdict = Transport().verify(tree, Greedy(dict.fromkeys(range(-1, 2), likeliest)), dice)
    assert verdict.nodes == [1] and verdict.token == 2


@pytest.mark.parametrize("dice", [SeededDice(0), EnumeratedDice()])
def test_a_chosen_token_beyond_the_vocabulary_is_a_bug(dice: Dice) -> None:
    tree = TreeBuilder()
    tree.add(3, -1, POINT)
    with pytest.raises(AssertionError, match="holds token 3, of 3 tokens"):
        Transport().verify(tree.build(), TableLaws({-1: A[0]}), dice)
