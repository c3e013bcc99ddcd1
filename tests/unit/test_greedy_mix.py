"""Greedy drafts: which tokens, which labels, which places."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import TableSource, sequence
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.records import Plan
from forerun.core.tree import IID, POINT, Proposal
from forerun.core.tree_template import grid
from forerun.drafters.base import Grown
from forerun.engine.engine import check_pair
from forerun.errors import ConfigError
from forerun.growers.greedy_mix import GreedyMix, most_likely, without
from forerun.registry import make
from forerun.verifiers.k_seq import KSeq

Q = np.array([0.1, 0.3, 0.3, 0.05, 0.25])


def grow(grower: GreedyMix, plan: Plan, q: np.ndarray = Q, dice=None):
    dice = dice or SeededDice(0)
    return Grown(TableSource(lambda tokens: q), grower).propose(
        [sequence([0], 9, dice)], [plan], [dice]
    )[0]


def test_top_tokens_are_chosen_and_the_last_is_drawn_from_the_rest() -> None:
    found: dict[int, float] = {}
    for tree, weight in EnumeratedDice().outcomes(
        lambda dice: grow(GreedyMix(branching=(3,)), Plan(3, 1), dice=dice)
    ):
        drawn, *top = tree.tokens.tolist()
        assert top == [1, 2] and tree.laws.tolist() == [IID, POINT, POINT]  # ties: the lower id
        np.testing.assert_allclose(tree.proposal(0, 5), [0.25, 0, 0, 0.125, 0.625], atol=1e-15)
        found[drawn] = found.get(drawn, 0.0) + weight
    assert found == pytest.approx({0: 0.25, 3: 0.125, 4: 0.625}, abs=1e-12)


def test_an_only_child_is_drawn_from_q() -> None:
    tree = grow(GreedyMix(branching=(1, 1)), Plan(4, 4))
    assert tree.laws.tolist() == [IID, IID] and tree.parents.tolist() == [-1, 0]
    np.testing.assert_allclose(tree.proposal(0, 5), Q)


def test_chosen_children_have_the_first_ranks() -> None:
    """Of the template's places the best child's subtree hangs below the likeliest token."""
    tree = grow(GreedyMix(template=grid(3)), Plan(3, 1))
    assert tree.tokens[1:].tolist() == [1, 2]
    deep = GreedyMix(branching=(2, 1))
    tree = grow(deep, Plan(3, 2))  # the third place is the first child of the first place
    assert tree.parents.tolist() == [-1, -1, 1] and tree.tokens[1] == 1


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_short_q_gives_all_its_tokens(count: int) -> None:
    q = np.array([0.0, 0.7, 0.0, 0.3, 0.0])
    for seed in range(20):
        tree = grow(GreedyMix(branching=(count,)), Plan(count, 1), q, SeededDice(seed))
        assert tree.tokens.tolist() == [3, 1]  # the drawn one is certain
        assert tree.proposal(0, 5)[3] == 1.0


def test_most_likely() -> None:
    q = Proposal(np.array([7, 3, 5, 1], np.int32), np.array([0.25, 0.25, 0.4, 0.1]))
    assert [q.ids[i] for i in most_likely(q, 2)] == [5, 3]
    assert most_likely(q, 0) == [] and len(most_likely(q, 4)) == 4
    left = without(q, most_likely(q, 2))
    assert left.probs == pytest.approx([0.714285714, 0, 0, 0.285714286]) and left.ids is q.ids


def test_a_rule_for_i_i_d_drafts_refuses_it() -> None:
    drafter = Grown(TableSource(lambda tokens: Q), GreedyMix())
    with pytest.raises(ConfigError, match="'k_seq' does not accept the drafts"):
        check_pair(drafter, KSeq())


def test_every_node_needs_a_child() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make("grower", "greedy_mix:branching=2+0")
