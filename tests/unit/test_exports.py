"""What `import forerun` gives, and what it costs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import forerun

COST = """
import json, sys, time
start = time.perf_counter()
import forerun
spent = time.perf_counter() - start
heavy = [name for name in ("torch", "numba", "numpy", "transformers") if name in sys.modules]
print(json.dumps({"seconds": spent, "heavy": heavy}))
"""


def test_all_equals_the_importable_names():
    assert sorted(forerun.__all__) == sorted(forerun._HOMES)
    for name, home in forerun._HOMES.items():
        assert getattr(forerun, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(forerun, "Engin")


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
