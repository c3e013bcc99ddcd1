"""Numba kernels that read memory at full speed; used without the native kernels."""

from __future__ import annotations

import numpy as np

from forerun.utils.jit import compiled


@compiled
def sum_in_one_stream(x: np.ndarray) -> int:
    """Sum of int64 [n]."""
    total = 0
    for i in range(len(x)):
        total += x[i]
    return total


@compiled
def sum_in_four_streams(x: np.ndarray) -> int:
    """Sum of the first 4 (n // 4) of int64 [n]."""
    n = len(x) // 4
    a, b, c, d = 0, 0, 0, 0
    for i in range(n):
        a += x[i]
        b += x[n + i]
        c += x[2 * n + i]
        d += x[3 * n + i]
    return a + b + c + d
