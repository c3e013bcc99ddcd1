"""Kernels compiled without counted references: none may give away an array. Fetching ahead."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import numpy as np
from numba import njit
from numba.core.registry import CPUDispatcher

import forerun.ngrams
from forerun.jit import fetch


def bare_kernels() -> list[CPUDispatcher]:
    names = [info.name for info in pkgutil.iter_modules(forerun.ngrams.__path__)]
    modules = [import_module(f"forerun.ngrams.{name}") for name in names]
    found = {id(x): x for module in modules for x in vars(module).values()}
    kernels = [x for x in found.values() if isinstance(x, CPUDispatcher)]
    return [kernel for kernel in kernels if kernel.targetoptions.get("_nrt") is False]


def test_no_bare_kernel_says_that_it_returns_an_array() -> None:
    """What it returned would be a second owner of memory that nobody counts."""
    kernels = bare_kernels()
    assert len(kernels) > 30
    for kernel in kernels:
        returned = kernel.py_func.__annotations__["return"]
        assert "ndarray" not in returned and "Table" not in returned, kernel.py_func.__name__


@njit
def asks(rows: np.ndarray, row: int) -> int:
    fetch(rows, row)
    return len(rows)


def test_a_row_that_is_fetched_need_not_exist() -> None:
    rows = np.arange(12).reshape(4, 3)
    assert [asks(rows, row) for row in (0, 3, 4, -1, 10**15)] == [4] * 5
    assert rows.tolist() == np.arange(12).reshape(4, 3).tolist()
    assert "prefetch" in asks.inspect_asm(asks.signatures[0])
