"""Kernels that read memory as fast as a core can; imported where that limit is measured."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def one(x: np.ndarray) -> int:
    """Sum of int64 [n], read in one stream."""
    total = 0
    for i in range(len(x)):
        total += x[i]
    return total


@njit(nogil=True, cache=True)
def four(x: np.ndarray) -> int:
    """Sum of the first 4 (n // 4) of int64 [n], read in four streams."""
    n = len(x) // 4
    a, b, c, d = 0, 0, 0, 0
    for i in range(n):
        a += x[i]
        b += x[n + i]
        c += x[2 * n + i]
        d += x[3 * n + i]
    return a + b + c + d
