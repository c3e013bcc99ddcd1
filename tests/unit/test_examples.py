"""The numbered examples run, as a reader would run them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
slow = partial(pytest.param, marks=pytest.mark.slow)


QUICK = {"01_generate", "03_write_a_drafter"}  # 02 and 05 have tests of what they print


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=() if file.stem in QUICK else pytest.mark.slow)
        for file in sorted(FOLDER.glob("[0-9]*.py"))
    ],
)
def test_an_example_runs(file: Path) -> None:
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it shows what it did"


@pytest.mark.parametrize(
    ("file", "word", "said"),
    [
        ("02_best_of_n.py", "x", "argument n: invalid int value: 'x'"),
        slow("02_best_of_n.py", "0", "n must be an integer >= 1, got 0"),
        slow("05_huggingface_model.py", "/nonexist", "there is no model folder /nonexist; check"),
        slow("06_search.py", "x", "argument n: invalid int value: 'x'"),
        slow("06_search.py", "0", "best of n, majority: n must be a whole number from 1 to 65536"),
    ],
)
def test_a_wrong_argument_is_one_line(file: str, word: str, said: str) -> None:
    code = [sys.executable, FOLDER / file, word]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300)
    assert done.returncode in (1, 2)
    *usage, line = done.stderr.splitlines()
    assert "error: " in line and said in line
    assert all(line.startswith("usage: ") for line in usage)


@pytest.mark.slow
def test_transformers_is_compared_without_the_checkpoint_s_own_penalties(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "repetition_penalty": 1.9}')
    code = [sys.executable, FOLDER / "05_huggingface_model.py", folder, "the cat sat"]
    shown = subprocess.run(code, capture_output=True, text=True, timeout=300).stdout
    (agree, total) = re.findall(r"(\d+) of (\d+) tokens agree", shown)[0]
    assert agree == total != "0"


def test_the_best_of_n_drafts_from_what_was_said_before() -> None:
    """Its second row of tokens per pass: the first sample has nothing to draft from."""
    code = [sys.executable, FOLDER / "02_best_of_n.py"]
    shown = subprocess.run(code, capture_output=True, text=True, timeout=300).stdout
    plain, drafted = re.findall(r"tau by trajectory: ([\d. ]+)", shown)
    taus = [float(word) for word in drafted.split()]
    assert {*plain.split()} == {"1.0"} and len(taus) == 16
    assert sum(taus[8:]) / 8 > 1.5, "later samples copy from earlier ones"
