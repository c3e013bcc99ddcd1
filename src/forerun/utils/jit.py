"""The decorator of Numba kernels that allocate no arrays, and small helpers for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from forerun.errors import ConfigError
from forerun.utils import jit_cache

if config.DISABLE_JIT:  # type: ignore[attr-defined]  # kernels need integers that wrap around
    raise ConfigError(
        "forerun needs Numba's compiler, but NUMBA_DISABLE_JIT disables it; unset that variable"
    )

jit_cache.compile_watcher()

# Without Numba's runtime, arrays are not reference counted. The atomic counters are slow for
# kernels with many arrays. The caller allocates all working memory; Numba rejects allocations.
kernel: Any = partial(njit, cache=True, nogil=True, _nrt=False)


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
