"""One tree laid over another: what both have is one node, what the second adds stands behind."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

from forerun.core.tree import IID, SWOR


@njit(cache=True, nogil=True)
def overlay(
    tokens: np.ndarray,
    parents: np.ndarray,
    size: int,
    most: int,
    new_tokens: np.ndarray,
    new_parents: np.ndarray,
    origins: np.ndarray,
) -> int:
    """Writes what a tree [m] adds to the first `size` nodes, at most up to `most` nodes in all.

    tokens, parents, origins int32 [>= most]: an added node's origin is its place in the new tree.
    Equal siblings are one node, the first. What stands below a node that found no room is left out.
    Returns how many nodes there are now.
    """
    where = np.empty(len(new_tokens), np.int32)  # -2: nowhere
    for i in range(len(new_tokens)):
        parent = np.int32(-1) if new_parents[i] < 0 else where[new_parents[i]]
        node = size if parent == -2 else parent + 1
        while node < size and not (parents[node] == parent and tokens[node] == new_tokens[i]):
            node += 1
        where[i] = node
        if node == size:  # not found
            where[i] = -2
            if parent != -2 and size < most:
                tokens[size], parents[size], origins[size] = new_tokens[i], parent, i
                where[i] = size
                size += 1
    return size


@njit(cache=True, nogil=True)
def copy_laws(
    laws: np.ndarray,
    rows: np.ndarray,
    cells: np.ndarray,
    origins: np.ndarray,
    start: int,
    size: int,
    tree: tuple[np.ndarray, np.ndarray, np.ndarray],
    first_row: int,
) -> None:
    """What a tree's laws, rows and cells say of the nodes [start, size), its own `origins` there.

    laws, cells int8, rows int32. The tree's first proposal is now number `first_row`. A drawn token
    that is kept differs from its siblings: SWOR.
    """
    own_laws, own_rows, own_cells = tree
    for node in range(start, size):
        origin = origins[node]
        law, row = own_laws[origin], own_rows[origin]
        laws[node] = SWOR if law == IID else law
        rows[node] = row + first_row if row >= 0 else -1
        if len(own_cells):
            cells[node] = own_cells[origin]


@cache
def warm_up() -> None:
    """Compiles the kernels, or loads them from the cache."""
    one, few = np.zeros(1, np.int32), np.zeros(1, np.int8)
    overlay(one, one.copy(), 0, 1, one.copy(), one - 1, one.copy())
    copy_laws(few, one, few.copy(), one.copy(), 0, 1, (few.copy(), one - 1, few.copy()), 0)
