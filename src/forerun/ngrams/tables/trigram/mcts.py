"""Monte-Carlo tree search over a tri-gram matrix, in one call per tree.

The compiled form of grower `monte_carlo` over `TrigramMatrix.row`: same visits, same draws from the
same uniforms, same tree (tests compare them).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from forerun.core.records import Plan
from forerun.core.tree import POINT, Tree
from forerun.core.tree_search import CONSTANT, EXPECTED, PATH, SearchSettings
from forerun.ngrams.tables.logits.kernels import Table
from forerun.ngrams.tables.trigram.kernels import row_of
from forerun.ngrams.tables.trigram.mcts_tree import SearchTree, extract_tree
from forerun.ngrams.tables.trigram.table import TrigramMatrix
from forerun.utils.jit import compiled, kernel


def draft(
    matrix: TrigramMatrix,
    tail: list[int],
    search: SearchSettings,
    plan: Plan,
    uniforms: np.ndarray,
    *,
    renormalise: bool = False,
) -> tuple[Tree, int]:
    """The tree below the pair of tokens `tail`, and the number of uniforms used.

    uniforms: at least search.iterations * search.steps.
    """
    tokens, parents = np.empty((2, 2 * search.top), np.int32)
    count, used = fill_tree(
        matrix.table,
        matrix.below,
        matrix.clock,
        tail[0],
        tail[1],
        search,
        renormalise,
        plan.nodes,
        plan.depth,
        uniforms,
        tokens,
        parents,
    )
    tree = Tree(
        tokens=tokens[:count],
        parents=parents[:count],
        laws=np.full(count, POINT, np.int8),
        rows=np.full(count, -1, np.int32),
        starts=np.zeros(1, np.int64),
        q_ids=np.empty(0, np.int32),
        q_probs=np.empty(0, np.float64),
    )
    return tree, used


@cache
def warm_up() -> None:
    """Compiles the search, or loads it from the cache."""
    search = SearchSettings(2, 2, 24, 32.0, 8.0, PATH, True, False)
    draft(TrigramMatrix(entries=2), [0, 1], search, Plan(), np.full(4, 0.5))


@compiled
def fill_tree(
    own: Table,
    base: Table,
    clock: int,
    a: int,
    b: int,
    search: SearchSettings,
    renormalise: bool,
    nodes: int,
    depth: int,
    uniforms: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
) -> tuple[int, int]:
    """Searches and writes the tree; returns the numbers of nodes and of uniforms used."""
    searched = _new_tree(1 + search.iterations * own.ids.shape[1])
    size, used = _search(own, base, clock, a, b, search, renormalise, uniforms, searched)
    return extract_tree(own, base, searched, size, search, nodes, depth, tokens, parents), used


@kernel
def _search(
    own: Table,
    base: Table,
    clock: int,
    a: int,
    b: int,
    search: SearchSettings,
    renormalise: bool,
    uniforms: np.ndarray,
    searched: SearchTree,
) -> tuple[int, int]:
    """Fills the search tree below the pair (a, b); returns its size and the uniforms used."""
    searched.tokens[0], searched.parents[0] = b, -1
    searched.reached[0], searched.rewards[0] = 1.0, 1.0
    searched.visits[0], searched.totals[0], searched.widths[0] = 0, 0.0, -1
    size, used = 1, 0
    for _ in range(search.iterations):
        node, level = 0, 0
        while searched.widths[node] > 0 and level < search.steps:
            node = _select(searched, node, search)
            level += 1
        if searched.widths[node] < 0 and level < search.steps:
            size = _expand(own, base, clock, a, searched, node, size, search, renormalise)
            if searched.widths[node] > 0:
                node = searched.firsts[node]
                level += 1
        reward = searched.rewards[node]
        if search.reward != CONSTANT:  # a constant reward needs no draws
            reward, used = _roll(
                own, base, a, searched, node, level, search, renormalise, uniforms, used
            )
        while node >= 0:
            searched.visits[node] += 1
            searched.totals[node] += reward
            node = searched.parents[node]
    return size, used


@compiled
def _new_tree(capacity: int) -> SearchTree:
    return SearchTree(
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.float64),
        np.empty(capacity, np.float64),
        np.empty(capacity, np.float64),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.float64),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
    )


@kernel
def _select(searched: SearchTree, node: int, search: SearchSettings) -> int:
    """The child with the largest published score; ties: the first."""
    first = searched.firsts[node]
    last = first + searched.widths[node]
    visits = searched.visits[node]
    if search.visits_all:
        for child in range(first, last):
            if searched.visits[child] == 0:
                return child
    scale = search.c1 + math.log((visits + search.c2 + 1.0) / search.c2)
    scale *= math.sqrt(visits)
    best, highest, unseen = first, -math.inf, searched.totals[node] / visits
    for child in range(first, last):
        n = searched.visits[child]
        mean = searched.totals[child] / n if n else unseen
        score = mean + scale * searched.priors[child] / (1.0 + n)
        if score > highest:
            best, highest = child, score
    return best


@kernel
def _pair(searched: SearchTree, node: int, a: int) -> tuple[int, int]:
    """The last two tokens of a node's path."""
    return (searched.tokens[searched.parents[node]] if node else a), searched.tokens[node]


@kernel
def _expand(
    own: Table,
    base: Table,
    clock: int,
    a: int,
    searched: SearchTree,
    node: int,
    size: int,
    search: SearchSettings,
    renormalise: bool,
) -> int:
    """Appends the children of a node; returns the new number of nodes."""
    before, last = _pair(searched, node, a)
    place = row_of(own, base, before, last)
    searched.firsts[node], searched.widths[node] = size, 0
    if place == -1:
        return size
    table, slot = (own, place) if place >= 0 else (base, -2 - place)
    if place >= 0:  # the base is shared and never evicts rows
        own.stamps[slot] = clock
    searched.widths[node] = table.counts[slot]
    total = _sum_of(table, slot)
    for j in range(table.counts[slot]):
        score = np.float64(table.probs[slot, j])
        share = score / total
        prior = share if renormalise else score
        reached = searched.reached[node] * share
        gain = 0.0
        if search.reward != CONSTANT:
            gain = reached if search.reward == EXPECTED else prior
        searched.tokens[size], searched.parents[size] = table.ids[slot, j], node
        searched.priors[size], searched.reached[size] = prior, reached
        searched.rewards[size] = searched.rewards[node] + gain
        searched.visits[size], searched.totals[size], searched.widths[size] = 0, 0.0, -1
        size += 1
    return size


@kernel
def _sum_of(table: Table, slot: int) -> float:
    total = 0.0
    for j in range(table.counts[slot]):
        total += table.probs[slot, j]
    return total


@kernel
def _roll(
    own: Table,
    base: Table,
    a: int,
    searched: SearchTree,
    node: int,
    level: int,
    search: SearchSettings,
    renormalise: bool,
    uniforms: np.ndarray,
    used: int,
) -> tuple[float, int]:
    """The reward of the path to `node`, completed by draws, and the uniforms used so far."""
    before, last = _pair(searched, node, a)
    reward, reached = searched.rewards[node], searched.reached[node]
    while level < search.steps:
        place = row_of(own, base, before, last)
        if place == -1:
            break
        table, slot = (own, place) if place >= 0 else (base, -2 - place)
        total = _sum_of(table, slot)
        at = _draw(table, slot, total, uniforms[used])
        used += 1
        score = np.float64(table.probs[slot, at])
        reached *= score / total
        if search.reward == EXPECTED:
            reward += reached
        else:
            reward += score / total if renormalise else score
        before, last = last, table.ids[slot, at]
        level += 1
    return reward, used


@kernel
def _draw(table: Table, slot: int, total: float, uniform: float) -> int:
    """Draws an entry of a row in proportion to its score, like `SeededDice.choice`."""
    goal, mass = uniform * total, 0.0
    for j in range(table.counts[slot]):
        mass += table.probs[slot, j]
        if mass > goal:
            return j
    return table.counts[slot] - 1
