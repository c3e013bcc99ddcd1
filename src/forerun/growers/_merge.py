"""Merges a draft tree into another; nodes with equal paths become one."""

from __future__ import annotations

from functools import cache

import numpy as np

from forerun.core.tree import IID, SWOR
from forerun.utils.jit import compiled


@compiled
def overlay(
    tokens: np.ndarray,
    parents: np.ndarray,
    size: int,
    max_nodes: int,
    new_tokens: np.ndarray,
    new_parents: np.ndarray,
    origins: np.ndarray,
) -> int:
    """Adds the nodes of a tree [m] to the first `size` nodes, up to `max_nodes`; returns the size.

    tokens, parents, origins int32 [>= max_nodes]: the origin of an added node is its index in the
    new tree. Equal siblings become the first of them. A node without room is left out with its
    descendants.
    """
    where = np.empty(len(new_tokens), np.int32)  # -2: left out
    for i in range(len(new_tokens)):
        parent = np.int32(-1) if new_parents[i] < 0 else where[new_parents[i]]
        node = size if parent == -2 else parent + 1
        while node < size and not (parents[node] == parent and tokens[node] == new_tokens[i]):
            node += 1
        where[i] = node
        if node == size:  # not found
            where[i] = -2
            if parent != -2 and size < max_nodes:
                tokens[size], parents[size], origins[size] = new_tokens[i], parent, i
                where[i] = size
                size += 1
    return size


@compiled
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
    """Copies laws, rows and cells of the added nodes [start, size) from their tree.

    laws, cells int8, rows int32. Rows are shifted by `first_row`. An IID node becomes SWOR, because
    merged siblings differ.
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
