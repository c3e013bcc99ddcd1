"""Decorators of Numba kernels, their cache key, and small helpers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic

from forerun.errors import ConfigError
from forerun.utils import jit_cache

if config.DISABLE_JIT:  # type: ignore[attr-defined]  # kernels need integers that wrap around
    raise ConfigError(
        "forerun needs Numba's compiler, but NUMBA_DISABLE_JIT disables it; unset that variable"
    )

jit_cache.compile_watcher()


def compiled(function: Any = None, **options: Any) -> Any:
    """Decorator: compiles a function without the GIL and caches the machine code on disk.

    The cache key covers what the kernel takes from other modules (`imported`).
    """
    if function is None:
        return partial(compiled, **options)
    dispatcher = njit(cache=True, nogil=True, **options)(function)
    if (file := _cache_file(dispatcher)) is not None:
        file._source_stamp = file._source_stamp, imported(function.__globals__)
    return dispatcher


def imported(names: Mapping[str, Any]) -> str:
    """A hash of the kernels, constants and named tuples among the globals of a module.

    Numba keys a cached kernel by the hash of its own file only, but machine code holds inlined
    kernels and constants of other files.
    """
    found = {name: _describe(value) for name, value in names.items() if name[:2] != "__"}
    described = [f"{name}={text}" for name, text in found.items() if text]
    return hashlib.sha256("\n".join(sorted(described)).encode()).hexdigest()


def _cache_file(dispatcher: Any) -> Any:
    """The index of cached machine code of a kernel; None: no folder can be written."""
    return getattr(dispatcher._cache, "_cache_file", None)


def _describe(value: Any) -> str:
    """What machine code may hold of a global; empty: nothing."""
    if isinstance(value, Dispatcher):
        return str(getattr(_cache_file(value), "_source_stamp", ""))
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, type) and hasattr(value, "_fields"):
        return f"{value.__qualname__}{value._fields}"
    return repr(value) if isinstance(value, Number | str | tuple | np.generic) else ""


# Without Numba's runtime, arrays are not reference counted. The atomic counters are slow for
# kernels with many arrays. The caller allocates all working memory; Numba rejects allocations.
kernel: Any = partial(compiled, _nrt=False)


@kernel
def copy(row: np.ndarray, to: np.ndarray) -> None:
    """Writes a row to the beginning of another. A NumPy slice assignment may allocate."""
    for i in range(len(row)):
        to[i] = row[i]


def _fetch(typing: Any, array: Any, row: Any) -> Any:
    """The prefetch instruction of `fetch`, in Numba's form for intrinsics."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = context.make_array(signature.args[0])(context, builder, args[0])
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        offset = builder.mul(args[1], builder.extract_value(parts.strides, 0))
        at = builder.gep(builder.bitcast(parts.data, byte), [offset])
        form = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
        builder.call(prefetch, [at, number(0), number(3), number(1)])  # read, high locality, data
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


# fetch(array, row) prefetches the first cache line of a row. The row need not exist.
fetch: Any = intrinsic(_fetch)
