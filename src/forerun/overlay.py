"""One tree laid over another: what both have is one node, what the second adds stands behind."""

from __future__ import annotations

import numpy as np
from numba import njit


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


def warm_up() -> None:
    """Compiles the kernel, or loads it from the cache."""
    one = np.zeros(1, np.int32)
    overlay(one, one.copy(), 0, 1, one.copy(), one - 1, one.copy())
