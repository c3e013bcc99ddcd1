"""Every numbered example runs as a user would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import forerun

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
REASONER = Path(forerun.__file__).parent / "assets" / "reasoner"
NEED_NO_MODEL = {"03_write_a_drafter.py"}
ARGUMENTS = {"02_best_of_n.py": ["3"], "06_search.py": ["4"]}
EXPECTED = {
    "01_generate.py": "tau",
    "02_best_of_n.py": "tau by trajectory",
    "03_write_a_drafter.py": "largest error of a probability",
    "04_stream.py": "tau",
    "05_huggingface_model.py": "tokens agree",
    "06_search.py": "step by step",
}


def run(example: Path) -> str:
    command = [sys.executable, str(example), *ARGUMENTS.get(example.name, [])]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(example):
    if example.name not in NEED_NO_MODEL and not REASONER.is_dir():
        pytest.skip("the embedded reasoner is not built here; `forerun train reasoner` makes it")
    text = run(example)
    assert EXPECTED[example.name] in text
    if example.name == "03_write_a_drafter.py":
        assert float(text.split()[-1]) < 1e-12


def test_examples_are_numbered_without_gaps():
    numbers = [int(path.name.partition("_")[0]) for path in EXAMPLES]
    assert numbers == list(range(1, len(EXAMPLES) + 1))
    assert {path.name for path in EXAMPLES} == set(EXPECTED)
