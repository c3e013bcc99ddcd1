"""What memory is like: large pages, where the system gives them, and the sizes of caches."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch import Tensor

HUGE = 1 << 21  # bytes of a large page
ROOMY = 48 << 10  # bytes of a first cache
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_madvise = getattr(ctypes.CDLL(None), "madvise", None)


def in_large_pages(fresh: Tensor) -> None:
    """Asks for large pages under a tensor of the CPU that nothing has been written to yet: fewer
    table walks for every byte that is read."""
    first = -(-fresh.data_ptr() // HUGE) * HUGE
    last = (fresh.data_ptr() + fresh.nbytes) // HUGE * HUGE
    if last > first and _madvise is not None and hasattr(mmap, "MADV_HUGEPAGE"):
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)


def cache_bytes(level: int | None = None) -> int:
    """The first core's largest cache, or its data cache of a level; 0 where the system does not
    say."""
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
def is_roomy() -> bool:
    """Whether the first cache has room for weights that are fetched ahead of their use and for the
    inputs: with 48 KiB (Zen 5), not with 32 KiB (Zen 4)."""
    return cache_bytes(level=1) >= ROOMY
