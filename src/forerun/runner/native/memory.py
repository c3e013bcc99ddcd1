"""Large pages and cache sizes."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch import Tensor

LARGE_PAGE = 1 << 21  # bytes of a large page
LARGE_L1_BYTES = 48 << 10  # bytes of an L1 data cache
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_madvise = getattr(ctypes.CDLL(None), "madvise", None)


def in_large_pages(fresh: Tensor) -> None:
    """Requests large pages for a CPU tensor that has not been written yet (fewer TLB misses)."""
    first = -(-fresh.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    last = (fresh.data_ptr() + fresh.nbytes) // LARGE_PAGE * LARGE_PAGE
    if last > first and _madvise is not None and hasattr(mmap, "MADV_HUGEPAGE"):
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)


def cache_bytes(level: int | None = None) -> int:
    """Bytes of the first core's largest cache, or its data cache of a level; 0: unknown."""
    sizes = [0]
    for folder in CACHES.glob("index*"):
        with suppress(OSError, ValueError):
            if level and _read(folder / "level", folder / "type") != [str(level), "Data"]:
                continue
            (text,) = _read(folder / "size")
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
            sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes)


def _read(*files: Path) -> list[str]:
    return [file.read_text().strip() for file in files]


@cache
def has_large_l1() -> bool:
    """Whether the L1 cache fits prefetched weights and inputs: 48 KiB (Zen 5), not 32 (Zen 4)."""
    return cache_bytes(level=1) >= LARGE_L1_BYTES
