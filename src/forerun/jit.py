"""How kernels are compiled that make no arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import njit

# They need not count references to any. Counting is atomic: it took most of the time of kernels
# with many arrays, and let no two cache misses overlap. A kernel that needs room gets it from its
# caller; Numba refuses one that makes some.
bare: Any = partial(njit, cache=True, nogil=True, _nrt=False)


@bare
def copy(row: np.ndarray, to: np.ndarray) -> None:
    """Writes a row to the beginning of another; NumPy's way may make an array."""
    for i in range(len(row)):
        to[i] = row[i]
