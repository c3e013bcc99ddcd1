"""Extracts the draft tree of a finished search: the most visited paths and their continuations.

Compiled; the plain form is in grower `monte_carlo`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.tree_search import SearchSettings
from forerun.ngrams.tables.logits.kernels import Table
from forerun.ngrams.tables.trigram.kernels import row_of
from forerun.utils.jit import compiled, kernel


class SearchTree(NamedTuple):
    """The search tree. Node 0 is the root; the children of a node are contiguous, best first."""

    tokens: np.ndarray  # int32 [n]
    parents: np.ndarray  # int32 [n]
    priors: np.ndarray  # float64 [n]
    reached: np.ndarray  # float64 [n], product of the shares along the path
    rewards: np.ndarray  # float64 [n], reward of the path to the node
    visits: np.ndarray  # int32 [n]
    totals: np.ndarray  # float64 [n]
    firsts: np.ndarray  # int32 [n], first child
    widths: np.ndarray  # int32 [n], number of children; -1 until expanded


@compiled
def extract_tree(
    own: Table,
    base: Table,
    searched: SearchTree,
    size: int,
    search: SearchSettings,
    limit: int,
    depth: int,
    tokens: np.ndarray,
    parents: np.ndarray,
) -> int:
    """Writes the most visited paths, then their most likely next tokens; returns the size."""
    best = _most_visited(searched.visits[:size], search.top)
    capacity = len(tokens) if search.drops_longest else limit
    where = np.full(size, -1, np.int32)  # searched node -> tree node; the root -> -1
    levels = np.zeros(size, np.int32)
    count = 0
    for node in best[:capacity]:
        parent = searched.parents[node]
        tokens[count], parents[count] = searched.tokens[node], where[parent]
        where[node], levels[node] = count, levels[parent] + 1
        count += 1
    ends, lengths = where[best], levels[best]
    for i in range(len(best)):
        node = best[i]
        place = row_of(own, base, searched.tokens[searched.parents[node]], searched.tokens[node])
        if count == capacity or place == -1 or lengths[i] >= depth:
            continue
        token = own.ids[place, 0] if place >= 0 else base.ids[-2 - place, 0]
        ends[i] = _put(tokens, parents, count, token, where[node])
        lengths[i] += 1
        count = max(count, ends[i] + 1)
    return _shortest(tokens, parents, count, ends, lengths, limit) if count > limit else count


@compiled
def _most_visited(visits: np.ndarray, top: int) -> np.ndarray:
    """Indices of the most visited nodes without the root, most visits first; ties: lowest index."""
    best = np.empty(top, np.int32)
    size = 0
    for node in range(1, len(visits)):
        n = visits[node]
        if n == 0 or (size == top and n <= visits[best[top - 1]]):
            continue
        size = min(size + 1, top)
        at = size - 1
        while at > 0 and n > visits[best[at - 1]]:
            best[at] = best[at - 1]
            at -= 1
        best[at] = node
    return best[:size]


@kernel
def _put(tokens: np.ndarray, parents: np.ndarray, count: int, token: int, parent: int) -> int:
    """The child of `parent` with `token`; appended if there is none."""
    for node in range(parent + 1, count):
        if parents[node] == parent and tokens[node] == token:
            return node
    tokens[count], parents[count] = token, parent
    return count


@compiled
def _shortest(
    tokens: np.ndarray,
    parents: np.ndarray,
    count: int,
    ends: np.ndarray,
    lengths: np.ndarray,
    limit: int,
) -> int:
    """Drops the longest (last) paths until `limit` nodes are left; returns the size."""
    uses = np.zeros(count, np.int32)
    for end in ends:
        node = end
        while node >= 0:
            uses[node] += 1
            node = parents[node]
    left = count
    while left > limit:
        drop = len(ends) - 1
        for i in range(drop, -1, -1):
            if lengths[i] > lengths[drop]:
                drop = i
        node = ends[drop]
        lengths[drop] = 0
        while node >= 0:
            uses[node] -= 1
            left -= uses[node] == 0
            node = parents[node]
    return _packed(tokens, parents, uses)


@compiled
def _packed(tokens: np.ndarray, parents: np.ndarray, uses: np.ndarray) -> int:
    """Moves the used nodes to the front; returns their number."""
    moved = np.full(len(uses) + 1, -1, np.int32)  # the last entry is the root
    kept = 0
    for node in range(len(uses)):
        if uses[node] > 0:
            moved[node] = kept
            tokens[kept], parents[kept] = tokens[node], moved[parents[node]]
            kept += 1
    return kept
