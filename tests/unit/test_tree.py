"""The tree's derived facts against brute force, and the law of a node given rejected siblings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.tree import EMPTY, IID, POINT, SWOR, Proposal, Resume, Tree, TreeBuilder, chain


@st.composite
def point_trees(draw: st.DrawFn) -> Tree:
    """Any parent-first tree of POINT nodes."""
    builder = TreeBuilder()
    for node in range(draw(st.integers(0, 12))):
        builder.add(draw(st.integers(0, 4)), draw(st.integers(-1, node - 1)))
    return builder.build()


def above(tree: Tree, node: int) -> list[int]:
    """The node and its ancestors, bottom up, without the root."""
    found = []
    while node >= 0:
        found.append(node)
        node = int(tree.parents[node])
    return found


@settings(deadline=None)
@given(point_trees())
def test_ancestors_depths_and_paths_equal_brute_force(tree):
    for node in range(len(tree)):
        line = above(tree, node)
        assert sorted(np.flatnonzero(tree.ancestors[node]).tolist()) == sorted(line)
        assert tree.depths[node] == len(line)
        assert tree.path(node) == [int(tree.tokens[n]) for n in reversed(line)]
    assert tree.ancestors.shape == (len(tree), len(tree))


@settings(deadline=None)
@given(point_trees())
def test_children_partition_the_nodes_in_order(tree):
    families = [tree.children(node) for node in range(-1, len(tree))]
    assert sorted(sum(families, [])) == list(range(len(tree)))
    assert all(family == sorted(family) for family in families)


@settings(deadline=None)
@given(point_trees())
def test_builder_answers_as_the_tree_that_it_builds(tree):
    builder = TreeBuilder()
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        builder.add(token, parent)
    for node in range(-1, len(tree)):
        assert builder.children(node) == tree.children(node)
        assert builder.path(node) == tree.path(node)
    assert len(builder) == len(tree)


def test_point_node_is_a_unit_mass():
    assert chain([2]).proposal(0, 4).tolist() == [0, 0, 1, 0]
    assert chain([2]).q(0) is None


def test_iid_siblings_keep_q_whatever_came_before():
    q, builder = Proposal.of(np.array([0.5, 0.0, 0.3, 0.2])), TreeBuilder()
    for token in (0, 0, 2):
        builder.add(token, -1, IID, q)
    tree = builder.build()
    for node in range(3):
        np.testing.assert_allclose(tree.proposal(node, 4), [0.5, 0, 0.3, 0.2], atol=1e-15)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_swor_siblings_lose_the_earlier_tokens_and_are_renormalised(weights, random):
    dense = np.array(weights) / sum(weights)
    order = random.sample(range(len(weights)), len(weights))
    q, builder = Proposal.of(dense), TreeBuilder()
    for token in order:
        builder.add(token, -1, SWOR, q)
    tree = builder.build()
    for node in range(len(order)):
        left = dense.copy()
        left[order[:node]] = 0
        np.testing.assert_allclose(tree.proposal(node, len(dense)), left / left.sum(), atol=1e-12)


def test_swor_node_also_loses_the_tokens_of_earlier_point_siblings():
    q, builder = Proposal.of(np.array([0.5, 0.3, 0.2])), TreeBuilder()
    builder.add(0, -1, POINT)
    builder.add(2, -1, SWOR, q)
    np.testing.assert_allclose(builder.build().proposal(1, 3), [0, 0.6, 0.4], atol=1e-15)


def test_cousins_do_not_change_each_other():
    q, builder = Proposal.of(np.array([0.5, 0.3, 0.2])), TreeBuilder()
    left, right = builder.add(0), builder.add(1)
    builder.add(0, left, SWOR, q)
    builder.add(1, right, SWOR, q)
    np.testing.assert_allclose(builder.build().proposal(3, 3), [0.5, 0.3, 0.2], atol=1e-15)


def test_siblings_share_one_stored_proposal():
    q, other, builder = Proposal.of(np.ones(2) / 2), Proposal.of(np.ones(3) / 3), TreeBuilder()
    first = builder.add(0, -1, SWOR, q)
    builder.add(1, -1, SWOR, q)
    builder.add(2, first, SWOR, other)
    tree = builder.build()
    assert tree.rows.tolist() == [0, 0, 1]
    assert tree.starts.tolist() == [0, 2, 5]
    assert tree.q(2).ids.tolist() == [0, 1, 2]


def test_builder_refuses_a_drawn_node_without_q_and_a_chosen_one_with_q():
    q = Proposal.of(np.ones(2) / 2)
    with pytest.raises(AssertionError, match="nodes need q"):
        TreeBuilder().add(0, -1, IID)
    with pytest.raises(AssertionError, match="nodes need q"):
        TreeBuilder().add(0, -1, POINT, q)
    with pytest.raises(AssertionError, match="add parents first"):
        TreeBuilder().add(0, 0)


def test_empty_tree_and_chain():
    assert len(EMPTY) == 0
    assert EMPTY.ancestors.shape == (0, 0)
    assert len(TreeBuilder().build()) == 0
    assert TreeBuilder().build().starts.tolist() == [0]
    assert chain([5, 6, 7]).parents.tolist() == [-1, 0, 1]
    assert chain([5, 6, 7]).path(2) == [5, 6, 7]


def test_proposal_of_keeps_the_support_only():
    q = Proposal.of(np.array([0, 0.25, 0, 0.75], dtype=np.float32))
    assert q.ids.tolist() == [1, 3]
    assert q.probs.tolist() == [0.25, 0.75]
    assert q.probs.dtype == np.float64


def test_nodes_below_a_token_are_cut_with_everything_that_belongs_to_them() -> None:
    q = Proposal(np.array([5, 7, 9], np.int32), np.array([0.5, 0.25, 0.25]))
    builder = TreeBuilder()
    for token, parent, law, drawn in [
        (5, -1, SWOR, q),
        (7, -1, SWOR, q),
        (5, 0, POINT, None),  # below a 5
        (9, 1, IID, q),
        (7, 2, POINT, None),  # below a 5
        (5, 3, POINT, None),
    ]:
        builder.add(token, parent, law, drawn)
    tree = builder.build()
    tree.cells = np.arange(6, dtype=np.int8)
    tree.sources = tuple("abcdef")
    tree.resume = Resume(1, torch.arange(5).reshape(5, 1))  # the root and nodes 0 to 3
    cut = tree.without_nodes_below(frozenset({5}))
    assert [cut.path(i) for i in range(len(cut))] == [[5], [7], [7, 9], [7, 9, 5]]
    assert cut.laws.tolist() == [SWOR, SWOR, IID, POINT] and cut.sources == ("a", "b", "d", "f")
    assert cut.cells is not None and cut.cells.tolist() == [0, 1, 3, 5]
    assert cut.resume is not None and cut.resume.rows[:, 0].tolist() == [0, 1, 2, 4]
    assert np.array_equal(cut.proposal(1, 10), tree.proposal(1, 10))
    assert tree.without_nodes_below(frozenset({8})) is tree
