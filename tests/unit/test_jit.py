"""Kernels without counted references give no array away; fetching ahead; the kernel cache."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core.caching import IndexDataCacheFile
from numba.core.registry import CPUDispatcher

import forerun.ngrams
from forerun.utils import jit_cache
from forerun.utils.jit import fetch

PYTHONPATH = os.pathsep.join(map(str, sys.path))


def bare_kernels() -> list[CPUDispatcher]:
    found = pkgutil.walk_packages(forerun.ngrams.__path__, "forerun.ngrams.")
    modules = [import_module(info.name) for info in found]
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


KERNELS = """
from numba import njit

@njit(cache=True)
def twice(x):
    return 2 * x

@njit(cache=True)
def fourfold(x):
    return twice(twice(x))
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that counts as ours, with a cache of its own, not compiled yet."""
    name = f"kernel_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(KERNELS)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = import_module(name)
    for kernel in (module.twice, module.fourfold):
        kernel.py_func.__module__ = f"forerun.{name}"
    return module.twice


RENAMED = """
from typing import NamedTuple
from numba import njit

class {0}(NamedTuple):
    x: int

@njit(cache=True)
def twice(pair):
    return 2 * pair.x

def run():
    return twice({0}(4))
"""


def test_a_cache_index_with_a_renamed_type_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit_cache.compile_watcher()
    name = f"renamed_{tmp_path.name}"
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    for type_name in ("Old", "Newer"):
        (tmp_path / f"{name}.py").write_text(RENAMED.format(type_name))
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = import_module(name)
        assert hasattr(module, type_name) and module.run() == 8


def test_a_kernel_that_cannot_be_kept_runs_and_that_is_said_once(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    said, watch = list[str](), jit_cache.compile_watcher()
    monkeypatch.setattr(watch, "notify", said.append)
    monkeypatch.setattr(watch, "_notified", {jit_cache.NOTICE})
    monkeypatch.setattr(IndexDataCacheFile, "_save_data", refuse)
    assert (kernel(2), kernel(0.5)) == (4, 1.0), "two signatures, neither is kept"
    (line,) = said
    assert line.startswith(f"cannot save compiled kernels in {kernel.stats.cache_path}: No space")
    assert "NUMBA_CACHE_DIR" in line


CALLEE = """
from typing import NamedTuple
import numpy as np
from forerun.utils.jit import compiled

FACTOR = {factor}
TABLE = np.array([1, {entry}])

class Pair(NamedTuple):
    {fields}

@compiled
def scaled(x):
    return {scale} * x
"""
CALLER = """
from {0} import FACTOR, TABLE, Pair, scaled
from forerun.utils.jit import compiled

@compiled
def run(pair, x):
    return pair.first, scaled(x) * FACTOR + TABLE[1]

def main():
    return run(Pair(10, 20), 1)
"""
FORMS = {"factor": 1, "entry": 0, "fields": "first: int; second: int", "scale": 2}
EDITS = {
    "a kernel": ({"scale": 3}, (10, 3)),
    "a constant": ({"factor": 5}, (10, 10)),
    "an array": ({"entry": 7}, (10, 9)),
    "fields of a named tuple": ({"fields": "second: int; first: int"}, (20, 2)),
}


@pytest.mark.parametrize(
    "edit", ["a kernel", *(pytest.param(e, marks=pytest.mark.slow) for e in list(EDITS)[1:])]
)
def test_kernels_are_compiled_again_when_another_file_changes(tmp_path: Path, edit: str) -> None:
    """Machine code holds what it takes from other files; Numba's own key is one file's hash."""
    (tmp_path / "caller.py").write_text(CALLER.format("callee"))
    changed, expected = EDITS[edit]
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": PYTHONPATH}
    found = []
    for form in (FORMS, FORMS, FORMS | changed):
        (tmp_path / "callee.py").write_text(CALLEE.format(**form))
        code = "import caller; print(caller.main(), len(caller.run.stats.cache_hits))"
        done = subprocess.run(
            [sys.executable, "-B", "-c", code],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout.strip())
    assert found == ["(10, 2) 0", "(10, 2) 1", f"{expected} 0"]
