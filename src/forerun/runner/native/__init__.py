"""C kernels for few-row passes on a CPU; available if the package's build compiled them.

They are plain functions, called through ctypes without the GIL, on torch's OpenMP threads.
FORERUN_NATIVE=off|avx2|avx512|avx512bf16|amx lowers the instruction set.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from forerun.errors import ConfigError
from forerun.runner.native import layout

LEVELS = ("off", "avx2", "avx512", "avx512bf16", "amx")


@dataclass(frozen=True)
class Kernels:
    """The library and the instruction set in use; level 0: not available."""

    library: ctypes.CDLL | None
    level: int  # index into LEVELS
    why: str  # one line on the level, or on why there is none

    def __bool__(self) -> bool:
        return self.level > 0


@cache
def kernels() -> Kernels:
    """The kernels of this machine; cached."""
    path = _find()
    if path is None:
        return Kernels(None, 0, "not built; install a C compiler, then forerun again")
    _share_threads()
    try:
        library = ctypes.CDLL(str(path))
        made_for = library.forerun_layout
        functions = {name: getattr(library, name) for name in layout.SIGNATURES}
    except (OSError, AttributeError) as error:
        return Kernels(None, 0, f"{path.name} cannot be loaded ({error}); install forerun again")
    made_for.restype = ctypes.c_int64
    if made_for() != layout.fingerprint():
        return Kernels(None, 0, f"{path.name} is of another version; install forerun again")
    library.forerun_level.restype = ctypes.c_int64
    for name, function in functions.items():
        function.argtypes, function.restype = layout.SIGNATURES[name], None
    best = library.forerun_level()
    if best == 0:
        return Kernels(library, 0, "this processor has no AVX2, and NEON kernels are missing")
    wanted = os.environ.get("FORERUN_NATIVE", LEVELS[best])
    if wanted not in LEVELS:
        raise ConfigError(f"FORERUN_NATIVE is {wanted!r}; use one of {', '.join(LEVELS)}")
    level = min(best, LEVELS.index(wanted))
    return Kernels(library, level, LEVELS[level] if level else "switched off by FORERUN_NATIVE")


def read(words: np.ndarray, threads: int, streams: int) -> None:
    """Reads an array once; every thread reads its part in one stream or in four."""
    found = kernels()
    found.library.forerun_read(  # type: ignore[union-attr]
        found.level, words.ctypes.data, words.nbytes // 4, threads, streams
    )


def _find() -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_kernels{suffix}")
        if path.exists():
            return path
    return None


def _share_threads() -> None:
    """Makes the OpenMP runtime that torch has loaded visible to the kernels.

    Two runtimes in one process would have two sets of threads that compete for cores.
    """
    import torch  # noqa: F401 - loads its runtime

    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
            return
    ctypes.CDLL("libgomp.so.1", ctypes.RTLD_GLOBAL)
