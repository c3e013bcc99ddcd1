"""How kernels are compiled that make no arrays."""

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

if config.DISABLE_JIT:  # type: ignore[attr-defined]  # integers of Python do not wrap round
    raise ConfigError(
        "forerun needs Numba's compiler, and NUMBA_DISABLE_JIT turns it off; unset that variable"
    )

jit_cache.attend()

# They need not count references to any. Counting is atomic: it took most of the time of kernels
# with many arrays, and let no two cache misses overlap. A kernel that needs room gets it from its
# caller; Numba refuses one that makes some.
bare: Any = partial(njit, cache=True, nogil=True, _nrt=False)


@bare
def copy(row: np.ndarray, to: np.ndarray) -> None:
    """Writes a row to the beginning of another; NumPy's way may make an array."""
    for i in range(len(row)):
        to[i] = row[i]


def _fetch(typing: Any, array: Any, row: Any) -> Any:
    """The instruction of `fetch`, as Numba is told of one."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = context.make_array(signature.args[0])(context, builder, args[0])
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        offset = builder.mul(args[1], builder.extract_value(parts.strides, 0))
        at = builder.gep(builder.bitcast(parts.data, byte), [offset])
        form = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
        builder.call(prefetch, [at, number(0), number(3), number(1)])  # to read, often, as data
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


# fetch(array, row) asks for the cache line where a row begins: it comes while other work is done.
# Nothing is read, so the row need not exist.
fetch: Any = intrinsic(_fetch)
