"""The numbered examples run, as a reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("[0-9]*.py")), ids=lambda file: file.stem)
def test_an_example_runs(file: Path) -> None:
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it shows what it did"
