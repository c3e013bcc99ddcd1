"""From a finished search to a tree: the most visited paths, continued, merged and cut to size.

Compiled; the plain form is `ranked` and `merged` of grower `monte_carlo`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from forerun.core.tree_search import Search
from forerun.ngrams.tables.logits.kernels import Table
from forerun.ngrams.tables.trigram.kernels import row_of
from forerun.utils.jit import bare


class Grove(NamedTuple):
    """The searched tree; node 0 is the root, children of a node stand together, best first."""

    tokens: np.ndarray  # int32 [n]
    parents: np.ndarray  # int32 [n]
    priors: np.ndarray  # float64 [n]
    reached: np.ndarray  # float64 [n], product of the shares of the path
    worths: np.ndarray  # float64 [n], reward of the path down to here
    visits: np.ndarray  # int32 [n]
    totals: np.ndarray  # float64 [n]
    firsts: np.ndarray  # int32 [n], first child
    widths: np.ndarray  # int32 [n], number of children; -1 until expanded


@njit(cache=True, nogil=True)
def harvest(
    own: Table,
    base: Table,
    grove: Grove,
    size: int,
    search: Search,
    limit: int,
    depth: int,
    tokens: np.ndarray,
    parents: np.ndarray,
) -> int:
    """Writes the tree of the most visited paths, each continued by its likeliest next token.

    Returns its size. All paths come before all continuations.
    """
    best = _most_visited(grove.visits[:size], search.top)
    room = len(tokens) if search.drops_longest else limit
    where = np.full(size, -1, np.int32)  # searched node -> tree node; the root -> -1
    levels = np.zeros(size, np.int32)
    count = 0
    for node in best[:room]:
        parent = grove.parents[node]
        tokens[count], parents[count] = grove.tokens[node], where[parent]
        where[node], levels[node] = count, levels[parent] + 1
        count += 1
    ends, lengths = where[best], levels[best]
    for i in range(len(best)):
        node = best[i]
        place = row_of(own, base, grove.tokens[grove.parents[node]], grove.tokens[node])
        if count == room or place == -1 or lengths[i] >= depth:
            continue
        token = own.ids[place, 0] if place >= 0 else base.ids[-2 - place, 0]
        ends[i] = _put(tokens, parents, count, token, where[node])
        lengths[i] += 1
        count = max(count, ends[i] + 1)
    return _shortest(tokens, parents, count, ends, lengths, limit) if count > limit else count


@njit(cache=True, nogil=True)
def _most_visited(visits: np.ndarray, top: int) -> np.ndarray:
    """Indices of the most visited nodes but the root, most visits first, ties: the lowest."""
    best = np.empty(top, np.int32)
    held = 0
    for node in range(1, len(visits)):
        n = visits[node]
        if n == 0 or (held == top and n <= visits[best[top - 1]]):
            continue
        held = min(held + 1, top)
        at = held - 1
        while at > 0 and n > visits[best[at - 1]]:
            best[at] = best[at - 1]
            at -= 1
        best[at] = node
    return best[:held]


@bare
def _put(tokens: np.ndarray, parents: np.ndarray, count: int, token: int, parent: int) -> int:
    """The child of `parent` that holds `token`, appended if there is none."""
    for node in range(parent + 1, count):
        if parents[node] == parent and tokens[node] == token:
            return node
    tokens[count], parents[count] = token, parent
    return count


@njit(cache=True, nogil=True)
def _shortest(
    tokens: np.ndarray,
    parents: np.ndarray,
    count: int,
    ends: np.ndarray,
    lengths: np.ndarray,
    limit: int,
) -> int:
    """Drops paths until `limit` nodes are left: longer ones first, later ones first."""
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


@njit(cache=True, nogil=True)
def _packed(tokens: np.ndarray, parents: np.ndarray, uses: np.ndarray) -> int:
    """Moves the nodes that are used to the front; returns how many there are."""
    moved = np.full(len(uses) + 1, -1, np.int32)  # the last entry stands for the root
    kept = 0
    for node in range(len(uses)):
        if uses[node] > 0:
            moved[node] = kept
            tokens[kept], parents[kept] = tokens[node], moved[parents[node]]
            kept += 1
    return kept
