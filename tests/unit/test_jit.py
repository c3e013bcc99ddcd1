"""Kernels compiled without counted references: none may give away an array."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from numba.core import types
from numba.core.registry import CPUDispatcher

import forerun.ngrams
from forerun.ngrams import memory, suffix_tree


def bare_kernels() -> list[CPUDispatcher]:
    names = [info.name for info in pkgutil.iter_modules(forerun.ngrams.__path__)]
    modules = [import_module(f"forerun.ngrams.{name}") for name in names]
    found = {id(x): x for module in modules for x in vars(module).values()}
    kernels = [x for x in found.values() if isinstance(x, CPUDispatcher)]
    return [kernel for kernel in kernels if kernel.targetoptions.get("_nrt") is False]


def test_no_bare_kernel_returns_an_array() -> None:
    """What it returned would be a second owner of memory that nobody counts."""
    memory.warm_up()
    suffix_tree.warm_up()
    compiled = [(k, s) for k in bare_kernels() for s in k.nopython_signatures]
    assert len(compiled) > 10
    for kernel, signature in compiled:
        parts = [signature.return_type, *getattr(signature.return_type, "types", ())]
        assert not any(isinstance(part, types.Array) for part in parts), kernel.py_func.__name__
