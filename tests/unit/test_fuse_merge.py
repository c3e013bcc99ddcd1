"""Merging trees of several drafters by arrays equals adding their nodes one by one."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.core.tree import EMPTY, IID, POINT, SWOR, Proposal, Tree, TreeBuilder
from forerun.drafters.fuse import merge
from forerun.growers._merge import overlay


def random_tree(rng: np.random.Generator, nodes: int) -> Tree:
    """Few tokens, so that trees share paths; i.i.d. siblings may be equal."""
    tree, laws = TreeBuilder(), {}
    for _ in range(nodes):
        parent = int(rng.integers(-1, len(tree)))
        if parent not in laws:
            law = int(rng.choice([POINT, IID, SWOR]))
            q = Proposal(np.arange(4, dtype=np.int32), rng.dirichlet(np.ones(4)))
            laws[parent] = law, None if law == POINT else q
        taken = {tree.tokens[child] for child in tree.children(parent)}
        left = [t for t in range(4) if laws[parent][0] == IID or t not in taken]
        if left:
            tree.add(int(rng.choice(left)), parent, *laws[parent])
    return tree.build()


def one_by_one(trees: list[Tree]) -> tuple[Tree, list[int]]:
    """The plain way, and which tree each node came from."""
    out, origins = TreeBuilder(), []
    for i, tree in enumerate(trees):
        where, laws = {-1: -1}, {int(row): tree.q(n) for n, row in enumerate(tree.rows)}
        for node in range(len(tree)):
            parent, token = where[int(tree.parents[node])], int(tree.tokens[node])
            same = [c for c in out.children(parent) if out.tokens[c] == token]
            if not same:
                law, q = int(tree.laws[node]), laws[int(tree.rows[node])]
                same = [out.add(token, parent, SWOR if law == IID else law, q)]
                origins.append(i)
            where[node] = same[0]
    return out.build(), origins


@pytest.mark.parametrize("seed", range(20))
def test_the_fused_tree_has_every_node_once_with_its_own_law(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, int(size)) for size in rng.integers(0, 14, 3)]
    fused, (plain, origins) = merge(trees, ["a", "b", "c"]), one_by_one(trees)
    assert fused.tokens.tolist() == plain.tokens.tolist()
    assert fused.parents.tolist() == plain.parents.tolist()
    assert fused.laws.tolist() == plain.laws.tolist()
    assert fused.sources == tuple("abc"[i] for i in origins)
    for field in ("tokens", "parents", "laws", "rows", "starts", "q_ids", "q_probs"):
        assert getattr(fused, field).dtype == getattr(plain, field).dtype, field
    for node in range(len(plain)):
        if plain.laws[node] == POINT:
            assert fused.q(node) is None
        else:
            assert np.array_equal(fused.q(node).probs, plain.q(node).probs)


def test_nothing_fused_with_nothing_is_nothing() -> None:
    assert len(merge([EMPTY, EMPTY])) == 0


def test_a_path_is_followed_behind_the_last_node_that_finds_room() -> None:
    tokens, parents = np.array([5, 6, 0, 0], np.int32), np.array([-1, 0, 0, 0], np.int32)
    more, above = np.array([7, 5, 6, 8, 9], np.int32), np.array([-1, -1, 1, 2, 0], np.int32)
    origins = np.zeros(4, np.int32)
    assert overlay(tokens, parents, 2, 3, more, above, origins) == 3  # 7, then there is no room
    assert (tokens[2], parents[2], origins[2]) == (7, -1, 0)
    assert overlay(tokens, parents, 2, 3, more[1:], np.array([-1, 0, 1, 2], np.int32), origins) == 3
    assert (tokens[2], parents[2], origins[2]) == (8, 1, 2)  # below 5, 6; nothing is left for 9
