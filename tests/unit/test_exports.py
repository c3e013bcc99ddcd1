"""What `import forerun` gives, and what it costs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.metadata import version

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
    """Under 0.2 s, the better of three runs as the machine may be busy; nothing heavy comes in."""
    runs = [
        json.loads(subprocess.check_output([sys.executable, "-W", "error", "-c", COST], text=True))
        for _ in range(3)
    ]
    assert runs[0]["heavy"] == []
    assert min(run["seconds"] for run in runs) < 0.2


def test_the_installed_version_is_the_modules():
    assert version("forerun") == forerun.__version__
