"""Trees drawn without replacement: Gumbel-Top-k by branching, and stochastic beams."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fakes import TableSource, sequence, table_law
from forerun.core.dice import Dice, EnumeratedDice, SeededDice
from forerun.core.growing import Grower
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.core.tree import SWOR, Proposal, Tree
from forerun.drafters.base import Grown
from forerun.errors import ConfigError
from forerun.growers.chain import Chain
from forerun.growers.gumbel import Gumbel
from forerun.growers.iid import Iid
from forerun.growers.stochastic_beam import (
    Child,
    Item,
    StochasticBeam,
    best_children,
    perturbed_children,
    sequential_children,
    truncated,
)
from forerun.verifiers.recursive import Recursive

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
DRAFT = table_law(2)


def tree_of(grower: Grower, dice: Dice, plan: Plan, law=DRAFT, known=lambda t: True) -> Tree:
    drafter = Grown(TableSource(law, known), grower)
    return drafter.propose([sequence([0, 1], 30, dice)], [plan], [dice])[0]


def levels(tree: Tree) -> tuple[frozenset[tuple[int, ...]], ...]:
    """The paths of every level."""
    return tuple(
        frozenset(tuple(tree.path(int(n))) for n in np.flatnonzero(tree.depths == depth))
        for depth in range(1, max(tree.depths, default=0) + 1)
    )


def enumerated(program) -> dict:
    found: dict = defaultdict(float)
    for value, weight in EnumeratedDice().outcomes(program):
        found[value] += weight
    return found


# Truncation


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**6), st.floats(-5, 5))
def test_stable_and_naive_truncation_agree(seed: int, bound: float) -> None:
    g = np.random.default_rng(seed).gumbel(size=6)
    naive = -np.log(np.exp(-bound) - np.exp(-g.max()) + np.exp(-g))
    np.testing.assert_allclose(truncated(bound, g, g.max()), naive, rtol=0, atol=1e-12)


def test_truncation_does_not_overflow() -> None:
    g = np.array([-800.0, -750.0, -751.0])
    moved = truncated(-3000.0, g, g.max())
    np.testing.assert_allclose(moved, [-3000.0] * 3, atol=1e-12)
    assert truncated(900.0, g, g.max())[1] == 900.0  # the naive form overflows in both


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.floats(-30, 3))
def test_largest_child_score_is_the_parents(seed: int, score: float) -> None:
    dice, probs = SeededDice(seed), np.random.default_rng(seed).dirichlet(np.ones(7))
    children = best_children(0, Item(-1, -2.0, score), probs, 7, dice)
    scores = [child.score for child in children]
    assert scores[0] == pytest.approx(score, abs=1e-12)
    assert scores == sorted(scores, reverse=True) and len({c.entry for c in children}) == 7


# The law of the beam


def leaf_orders(count: int, depth: int = 2, law=DRAFT) -> dict:
    """Paths of each level for the first leaves in sequential draws without replacement, exactly.

    Leaves are drawn until `count` of every level have come up; level i keeps the first `count`.
    """
    leaves = {}
    for path in itertools.product(range(3), repeat=depth):
        tokens = [0, 1]
        chance = 1.0
        for token in path:
            chance *= law(tokens)[token]
            tokens.append(token)
        leaves[path] = chance

    def program(dice: Dice) -> tuple[frozenset, ...]:
        left = np.array(list(leaves.values()))
        kept: list[list[tuple[int, ...]]] = [[] for _ in range(depth)]
        while any(len(level) < count for level in kept) and left.sum() > 0:
            i = dice.choice(left)
            left[i] = 0.0
            for size, level in enumerate(kept, start=1):
                prefix = list(leaves)[i][:size]
                if prefix not in level and len(level) < count:
                    level.append(prefix)
        return tuple(frozenset(level) for level in kept)

    return enumerated(program)


def test_one_by_one_has_the_law_of_drawing_whole_paths() -> None:
    expected = leaf_orders(2)
    found = enumerated(lambda dice: levels(tree_of(StochasticBeam(width=2), dice, Plan(4, 2))))
    assert found.keys() == expected.keys()
    for paths, chance in expected.items():
        assert found[paths] == pytest.approx(chance, abs=1e-12)


@pytest.mark.parametrize("misses", [(1,), pytest.param((), marks=pytest.mark.slow)])
def test_race_has_the_law_of_one_by_one(misses: tuple[int, ...]) -> None:
    """Whole trees, siblings in order; with `misses` the source knows nothing after a token."""

    def known(tokens) -> bool:
        return len(tokens) < 3 or tokens[-1] not in misses

    def shape(dice: Dice) -> tuple:
        tree = tree_of(StochasticBeam(width=2), dice, Plan(4, 2), known=known)
        return tuple(tuple(tree.path(node)) for node in range(len(tree)))

    expected, counts, runs = enumerated(shape), defaultdict(int), 10_000
    dice = SeededDice(6)
    for _ in range(runs):
        counts[shape(dice)] += 1
    assert counts.keys() <= expected.keys()
    rare = sum(chance for chance in expected.values() if runs * chance < 5)
    bins = [(counts[key], chance) for key, chance in expected.items() if runs * chance >= 5]
    bins.append((runs - sum(count for count, _ in bins), rare))
    observed, chances = np.array([pair for pair in bins if runs * pair[1] >= 5]).T
    wanted = chances / chances.sum() * observed.sum()
    assert chisquare(observed, wanted).pvalue > 1e-3


def test_first_node_of_each_level_is_a_draw_from_the_draft() -> None:
    """The best path of a level, followed down from the first child, is an exact sample."""
    found: dict = defaultdict(float)

    def best(dice: Dice) -> int:
        tree = tree_of(StochasticBeam(width=2), dice, Plan(2, 1))
        return int(tree.tokens[0])

    for token, chance in enumerated(best).items():
        found[token] += chance
    for token in range(3):
        assert found[token] == pytest.approx(DRAFT([0, 1])[token], abs=1e-12)
    qs = [Proposal.of(DRAFT([0, 1]))]
    second: dict = defaultdict(float)

    def path(dice: Dice) -> tuple[int, int]:
        beam = [Item(-1, 0.0, 0.0)]
        first = sequential_children(beam, qs, 2, dice)
        items = [Item(i, child.logp, child.score) for i, child in enumerate(first)]
        below = [Proposal.of(DRAFT([0, 1, child.entry])) for child in first]
        top = sequential_children(items, below, 2, dice)[0]
        return first[top.parent].entry, top.entry

    for tokens, chance in EnumeratedDice().outcomes(path):
        second[tokens] += chance
    for (a, b), chance in second.items():
        assert chance == pytest.approx(DRAFT([0, 1])[a] * DRAFT([0, 1, a])[b], abs=1e-12)


@pytest.mark.parametrize("make", [SeededDice, lambda seed: Walk(seed)])
def test_a_beam_as_wide_as_the_tree_holds_every_path(make) -> None:
    tree = tree_of(StochasticBeam(width=9), make(3), Plan(12, 2))
    assert [len(level) for level in levels(tree)] == [3, 9]


class Walk:
    """Dice without uniforms, one walk: the plain form runs."""

    def __init__(self, seed: int) -> None:
        self._dice = SeededDice(seed)

    def choice(self, probs: np.ndarray) -> int:
        return self._dice.choice(probs)

    def coin(self, heads: float) -> bool:
        return self._dice.coin(heads)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 14), st.integers(1, 4))
def test_budget_labels_and_order(seed: int, width: int, nodes: int, depth: int) -> None:
    for dice in (SeededDice(seed), Walk(seed)):
        tree = tree_of(StochasticBeam(width=width), dice, Plan(nodes, depth))
        assert len(tree) <= nodes and tree.depths.max() <= depth
        assert np.bincount(tree.depths).max() <= width
        assert (tree.laws == SWOR).all() and (tree.parents < np.arange(len(tree))).all()
        for parent in range(-1, len(tree)):
            tokens = tree.tokens[tree.children(parent)].tolist()
            assert len(set(tokens)) == len(tokens)


def test_excluded_tokens_are_never_drawn() -> None:
    q = Proposal(np.arange(4, dtype=np.int32), np.array([0, 0.5, 0.5, 0]))
    beam = [Item(-1, 0.0, 0.0)]
    for seed in range(20):
        assert sorted(c.entry for c in perturbed_children(beam, [q], 4, SeededDice(seed))) == [1, 2]
        assert sorted(c.entry for c in sequential_children(beam, [q], 4, Walk(seed))) == [1, 2]


def test_log_probabilities_of_paths_add_up() -> None:
    q = Proposal(np.arange(3, dtype=np.int32), Q)
    beam = [Item(-1, -1.0, 0.5)]
    for children in (
        perturbed_children(beam, [q], 2, SeededDice(1)),
        sequential_children(beam, [q], 2, Walk(1)),
    ):
        assert len(children) == 2
        for child in children:
            assert isinstance(child, Child)
            assert child.logp == pytest.approx(-1.0 + np.log(Q[child.entry]), abs=1e-12)


# Accepted drafts, context-free A at every level (bonus not counted)


class Everywhere(dict):
    sampling = Sampling()

    def __missing__(self, node: int) -> np.ndarray:
        return P


def accepted(grower: Grower, plan: Plan) -> float:
    def program(dice: Dice) -> int:
        tree = tree_of(grower, dice, plan, law=lambda tokens: Q)
        return len(Recursive().verify(tree, Everywhere(), dice).nodes)

    return sum(count * chance for count, chance in EnumeratedDice().outcomes(program))


@pytest.mark.parametrize(("branching", "value"), [((1,), 0.7), ((2,), 0.82), ((3,), 1.0)])
def test_acceptance_at_one_level(branching, value) -> None:
    assert accepted(Gumbel(branching=branching), Plan(9, 9)) == pytest.approx(value, abs=1e-12)


LEVEL = {1: 0.7, 2: 0.82, 3: 1.0}
TREES = [
    (Chain(), Plan(2, 2), 1.19),
    (Chain(), Plan(4, 4), 1.7731),
    (Iid(width=(2, 1)), Plan(4, 2), 1.292),
    (Iid(width=2), Plan(4, 2), 1.292),
    (Iid(width=(2, 2)), Plan(6, 2), 1.3376),
    (Gumbel(branching=(2, 1)), Plan(4, 2), 1.394),
    (Gumbel(branching=(2, 2)), Plan(6, 2), 1.4924),
    (Gumbel(branching=(3, 1)), Plan(6, 2), 1.7),
]


@pytest.mark.parametrize(("grower", "plan", "value"), TREES)
def test_expected_accepted_drafts(grower, plan, value) -> None:
    assert accepted(grower, plan) == pytest.approx(value, abs=1e-9)


def test_six_in_a_chain_by_the_closed_form() -> None:
    assert sum(0.7**i for i in range(1, 7)) == pytest.approx(2.058819, abs=1e-9)


@pytest.mark.parametrize("branching", [(2, 1), (2, 2), (3, 1)])
def test_closed_form_for_context_free_trees(branching) -> None:
    first, second = (LEVEL[b] for b in branching)
    found = accepted(Gumbel(branching=branching), Plan(9, 9))
    assert found == pytest.approx(first * (1 + second), abs=1e-9)


def test_stochastic_beam_of_two_by_two() -> None:
    """The sheet's Monte Carlo has 1.3826 +- .0017; enumeration has the number itself."""
    exact = accepted(StochasticBeam(width=2), Plan(4, 2))
    assert exact == pytest.approx(1.379176, abs=1e-6) and abs(exact - 1.3826) < 3 * 0.0017
    runs, lengths, dice = 4000, [], SeededDice(9)
    for _ in range(runs):
        tree = tree_of(StochasticBeam(width=2), dice, Plan(4, 2), law=lambda tokens: Q)
        lengths.append(len(Recursive().verify(tree, Everywhere(), dice).nodes))
    assert abs(np.mean(lengths) - exact) < 3.3 * np.std(lengths) / np.sqrt(runs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StochasticBeam(width=0), "width=0 is too small"),
        (lambda: Gumbel(branching=(2, 0)), r"at least 1 .*, got \(2, 0\)"),
    ],
)
def test_bad_options(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_branching_from_text() -> None:
    from forerun import registry

    gumbel = registry.make("grower", "gumbel:branching=2+1")
    assert gumbel.template.places == ((0,), (1,), (0, 0), (1, 0))
    assert registry.make("grower", "iid:width=2+1").width == (2, 1)
