"""How kernels are compiled that make no arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

from numba import njit

# They need not count references to any. Counting is atomic: it took most of the time of kernels
# with many arrays, and let no two cache misses overlap. A kernel that needs room gets it from its
# caller; Numba refuses one that makes some.
bare: Any = partial(njit, cache=True, nogil=True, _nrt=False)
