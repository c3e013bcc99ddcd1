"""Block verification of chains: the sheet's oracles, its law, and what it leaves to others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.dice import Dice, EnumeratedDice, SeededDice
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.sampling import Sampling
from forerun.core.tree import IID, POINT, SWOR, Proposal, Tree, TreeBuilder, chain
from forerun.verifiers.block import Block, block_weights, can_win
from forerun.verifiers.recursive import Recursive

Law = Callable[[Many[int]], np.ndarray]  # of the next token after a path

A = (np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]))
COIN = (np.array([1, 2]) / 3, np.array([2, 1]) / 3)
ROWS_P = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])
ROWS_Q = np.array([[0.3, 0.4, 0.3], [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]])


def always(law: np.ndarray) -> Law:
    return lambda path: law


def markov(first: np.ndarray, rows: np.ndarray) -> Law:
    return lambda path: rows[path[-1]] if path else first


class PathLaws(dict):
    """laws[node] from a law over paths of the tree."""

    sampling = Sampling()

    def __init__(self, tree: Tree, law: Law) -> None:
        super().__init__({node: law(tree.path(node)) for node in range(-1, len(tree))})


def drawn(q: Law, length: int, dice: Dice) -> Tree:
    tree, node = TreeBuilder(), -1
    for _ in range(length):
        proposal = Proposal.of(q(tree.path(node)))
        node = tree.add(int(proposal.ids[dice.choice(proposal.probs)]), node, IID, proposal)
    return tree.build()


def outcomes(p: Law, q: Law, length: int, verifier: Verifier) -> list[tuple[Tree, Verdict, float]]:
    def program(dice: EnumeratedDice) -> tuple[Tree, Verdict]:
        tree = drawn(q, length, dice)
        return tree, verifier.verify(tree, PathLaws(tree, p), dice)

    return [(*found, weight) for found, weight in EnumeratedDice().outcomes(program)]


def accepted(p: Law, q: Law, length: int, verifier: Verifier) -> np.ndarray:
    """P(0, 1, .. g drafts are kept)."""
    shares = np.zeros(length + 1)
    for _, verdict, weight in outcomes(p, q, length, verifier):
        shares[len(verdict.nodes)] += weight
    return shares


def mean(shares: np.ndarray) -> float:
    return float(shares @ np.arange(len(shares)))


def full_information_bound(p: Law, q: Law, length: int) -> float:
    """sum over prefixes of min(p, q): what a rule that knew all laws beforehand could keep."""
    total, vocab = 0.0, len(p(()))
    for size in range(1, length + 1):
        for path in itertools.product(range(vocab), repeat=size):
            total += min(
                np.prod([law(path[:i])[token] for i, token in enumerate(path)]) for law in (p, q)
            )
    return total


INSTANCES = [
    (always(A[0]), always(A[1]), 2, 1.19, 1.25, (0.30, 0.15, 0.55), 1.31),
    (always(A[0]), always(A[1]), 3, 1.533, 1.695, (0.30, 0.15, 0.105, 0.445), 1.833),
    (always(COIN[0]), always(COIN[1]), 2, 10 / 9, 11 / 9, (1 / 3, 1 / 9, 5 / 9), 12 / 9),
    (
        markov(A[0], ROWS_P),
        markov(A[1], ROWS_Q),
        3,
        1.485,
        1.67,
        (0.30, 0.15, 0.13, 0.42),
        1.79,
    ),
]


@pytest.mark.parametrize(("p", "q", "g", "token", "block", "shares", "bound"), INSTANCES)
def test_oracles(p, q, g, token, block, shares, bound) -> None:
    assert mean(accepted(p, q, g, Recursive())) == pytest.approx(token, abs=1e-12)
    found = accepted(p, q, g, Block())
    np.testing.assert_allclose(found, shares, atol=1e-12)
    assert mean(found) == pytest.approx(block, abs=1e-12)
    assert full_information_bound(p, q, g) == pytest.approx(bound, abs=1e-9)


@pytest.mark.parametrize(("p", "q", "g"), [row[:3] for row in INSTANCES])
def test_kept_lengths_have_the_mean_of_the_weights(p, q, g) -> None:
    """P(tau >= i) = E[w_i], the draft drawn from q."""
    found = accepted(p, q, g, Block())
    expected = np.zeros(g + 1)
    for path in itertools.product(range(len(p(()))), repeat=g):
        tree = TreeBuilder()
        for i, token in enumerate(path):
            tree.add(token, i - 1, IID, Proposal.of(q(path[:i])))
        chance = np.prod([q(path[:i])[token] for i, token in enumerate(path)])
        weights = block_weights(tree.build(), PathLaws(tree.build(), p))
        expected[: len(weights)] += chance * np.array(weights)
    np.testing.assert_allclose(found[::-1].cumsum()[::-1], expected, atol=1e-12)


@pytest.mark.parametrize(("p", "q", "g"), [row[:3] for row in INSTANCES])
def test_first_two_tokens_have_their_joint_law(p, q, g) -> None:
    """A verdict of one token is completed by a plain draw, as the next step would."""
    vocab = len(p(()))
    law = np.zeros((vocab, vocab))
    for tree, verdict, weight in outcomes(p, q, g, Block()):
        first, *rest = verdict.tokens(tree)
        law[first] += weight * (np.eye(vocab)[rest[0]] if rest else p((first,)))
    expected = np.array([p(())[i] * p((i,)) for i in range(vocab)])
    np.testing.assert_allclose(law, expected, atol=1e-12)


def test_one_draft_is_the_rule_for_one_draft() -> None:
    np.testing.assert_allclose(accepted(*map(always, A), 1, Block()), [0.3, 0.7], atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 3))
def test_never_worse_than_token_by_token(seed: int, g: int) -> None:
    rng = np.random.default_rng(seed)
    tables = rng.dirichlet(np.full(3, 0.7), (2, 4))  # a row after nothing, and after each token
    p, q = (markov(table[3], table[:3]) for table in tables)
    token, block = (mean(accepted(p, q, g, rule)) for rule in (Recursive(), Block()))
    assert token - 1e-12 <= block <= full_information_bound(p, q, g) + 1e-9


def test_equal_laws_keep_everything() -> None:
    p = always(np.array([0.2, 0.3, 0.5]))
    np.testing.assert_allclose(accepted(p, p, 3, Block()), [0, 0, 0, 1], atol=1e-12)


def test_disjoint_laws_keep_nothing() -> None:
    p, q = always(np.array([0.5, 0.5, 0, 0])), always(np.array([0, 0, 0.4, 0.6]))
    np.testing.assert_allclose(accepted(p, q, 3, Block()), [1, 0, 0, 0], atol=1e-12)


def test_seeded_dice_follow_the_enumerated_law() -> None:
    p, q, g = INSTANCES[1][:3]
    counts = np.zeros(g + 1)
    for seed in range(4000):
        dice = SeededDice(seed)
        tree = drawn(q, g, dice)
        counts[len(Block().verify(tree, PathLaws(tree, p), dice).nodes)] += 1
    expected = np.array(INSTANCES[1][5])
    assert (((counts / 4000 - expected) ** 2 / expected).sum() * 4000) < 16.3  # 3 df, 1e-3


def test_a_row_behind_an_excluded_token_is_not_looked_at() -> None:
    tree = TreeBuilder()
    q = Proposal.of(np.full(3, 1 / 3))
    for i, token in enumerate((0, 1, 2)):
        tree.add(token, i - 1, IID, q)
    rows = {-1: np.array([0.5, 0.5, 0.0]), 0: np.array([1.0, 0.0, 0.0])}
    laws = PathLaws(chain(()), always(A[0]))
    laws.clear()
    laws.update(rows)  # nodes 1 and 2 have no row: looking would be a KeyError
    assert len(Block().verify(tree.build(), laws, SeededDice(1)).nodes) <= 1


def test_where_the_rule_is_used() -> None:
    q = Proposal.of(np.full(3, 1 / 3))

    def tree(parents: tuple[int, ...], laws: tuple[int, ...]) -> Tree:
        builder = TreeBuilder()
        for i, (parent, law) in enumerate(zip(parents, laws, strict=True)):
            builder.add(i % 3, parent, law, None if law == POINT else q)
        return builder.build()

    assert can_win(tree((-1, 0), (IID, IID))) and can_win(tree((-1, 0, 1), (POINT, SWOR, POINT)))
    assert not can_win(tree((-1,), (IID,))), "one draft: nothing to win"
    assert not can_win(tree((-1, 0), (POINT, POINT))), "ratios of chosen tokens never exceed 1"
    assert not can_win(tree((-1, -1), (IID, IID))) and not can_win(tree((-1, 0, 0), (IID,) * 3))


def test_trees_are_judged_by_recursive_rejection() -> None:
    q = Proposal.of(A[1])
    tree = TreeBuilder()
    for token in (2, 0):
        tree.add(token, -1, SWOR, q)
    tree.add(1, 0, IID, q)
    laws = PathLaws(tree.build(), always(A[0]))
    for seed in range(50):
        ours, theirs = SeededDice(seed), SeededDice(seed)
        block = Block().verify(tree.build(), laws, ours)
        assert block == Recursive().verify(tree.build(), laws, theirs)


def test_greedy_follows_the_argmax() -> None:
    class Greedy(PathLaws):
        sampling = Sampling(temperature=0.0)

        def logits(self, node: int) -> np.ndarray:
            return np.log(self[node])

    tree = chain([0, 0, 1])
    assert Block().verify(tree, Greedy(tree, always(A[0])), SeededDice(0)) == Verdict([0, 1], 0)
