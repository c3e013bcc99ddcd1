"""What `import forerun` gives, and what it costs."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import forerun
from forerun import catalog

COST = """
import json, sys, time
start = time.perf_counter()
import forerun
spent = time.perf_counter() - start
forerun.methods()  # the catalog is light, too
heavy = [name for name in ("torch", "numba", "numpy", "transformers") if name in sys.modules]
print(json.dumps({"seconds": spent, "heavy": heavy}))
"""


PUBLIC = {
    "Engine",
    "Event",
    "ForerunError",
    "Model",
    "Result",
    "Sample",
    "Sampling",
    "Stats",
    "generate",
    "load",
    "methods",
    "pull",
}


def test_all_equals_the_importable_names():
    assert set(forerun.__all__) == set(forerun._HOMES) == PUBLIC
    assert set(dir(forerun)) >= PUBLIC
    for name, home in forerun._HOMES.items():
        module, _, there = home.partition(":")
        thing = getattr(importlib.import_module(module), there)
        assert getattr(forerun, name) is thing
        assert there == name or name == "methods"


def test_types_for_checkers_are_the_names_at_run_time():
    """What `if TYPE_CHECKING` imports is what `__getattr__` gives."""
    tree = ast.parse(Path(forerun.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    found = {
        alias.asname or alias.name: f"{line.module}:{alias.name}"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    assert found == forerun._HOMES


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(forerun, "Engin")


def test_methods_are_the_rows_of_the_catalog():
    rows = forerun.methods()
    assert rows == catalog.rows() and "stand" in {row.name for row in rows if row.state == "works"}


def test_importing_is_cheap():
    """Under 0.2 s, the best of three runs as the machine may be busy; nothing heavy comes in."""
    command = [sys.executable, "-W", "error", "-c", COST]
    env = os.environ | {"PYTHONPATH": str(Path(forerun.__file__).parents[1])}
    runs = [json.loads(subprocess.check_output(command, text=True, env=env)) for _ in range(3)]
    assert runs[0]["heavy"] == []
    assert min(run["seconds"] for run in runs) < 0.2


def test_the_installed_version_is_the_modules():
    try:
        installed = version("forerun")
    except PackageNotFoundError:
        pytest.skip("forerun runs from its source folder here; `make test` installs it")
    assert installed == forerun.__version__
