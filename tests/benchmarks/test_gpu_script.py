"""The script for GPUs: a part that hangs, crashes or fails is a row, and later parts still run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
STAND_INS = {
    "correctness": "report.add('begun', 1); import os; os.abort()",
    "passes": "report.add('read', 2.5, 'TB/s', least=3); import signal; signal.pause()",
    "decoding": "raise ValueError('no such thing')",
    "hosttime": "from .report import OutOfTime; report.add('a', 1); report.check(1e9)",
    "training": "report.add('a', 1, 'x', most=1); report.add('b', 'text')",
    "prepare": "pass",
}


def script(folder: Path, *words: str) -> tuple[int, str, dict]:
    """Runs a copy of the script whose parts are stand-ins; status, output, gpu.json."""
    shutil.copytree(FOLDER, folder / "benchmarks")
    for name, body in STAND_INS.items():
        text = f"def run(report, setting):\n    {body}\n"
        (folder / "benchmarks" / "gpu_parts" / f"{name}.py").write_text(text)
    command = [sys.executable, str(folder / "benchmarks" / "gpu.py"), "--smoke", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, "--out", str(folder / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (folder / "out" / "gpu.json").exists(), done.stderr
    return done.returncode, done.stdout, json.loads((folder / "out" / "gpu.json").read_text())


@pytest.mark.slow
def test_every_way_to_fail_is_a_row_and_what_was_measured_before_is_kept(tmp_path: Path) -> None:
    names = "correctness,passes=20,decoding,hosttime,training"
    status, out, facts = script(tmp_path, "--parts", names, "--limit", "200")
    found = {part["name"]: part for part in facts["parts"]}
    assert status == 1 and facts["is_gpu"] is False
    assert {name: part["status"] for name, part in found.items()} == {
        "correctness": "failed",
        "passes": "killed",
        "decoding": "failed",
        "hosttime": "out of time",
        "training": "done",
    }
    rows = {name: [(row["name"], row["value"]) for row in found[name]["rows"]] for name in found}
    assert rows["correctness"][0] == ("begun", 1) and "status -6" in rows["correctness"][1][1]
    assert rows["passes"][0] == ("read", 2.5) and "did not end within" in rows["passes"][1][1]
    assert rows["decoding"] == [("FAILED", "ValueError: no such thing")]
    assert rows["hosttime"][0] == ("a", 1) and rows["hosttime"][1][0] == "stopped"
    assert rows["training"] == [("a", 1), ("b", "text")]
    assert facts["seconds"] <= 200
    assert "| b | read | 2.5 TB/s | >= 3 | MISSED |" in out and "smoke only" in out
    assert out.splitlines()[-1].endswith(f"results in {tmp_path / 'out'}")
    assert "ValueError" in (tmp_path / "out" / "gpu.log").read_text()
    assert (tmp_path / "out" / "gpu.md").read_text() in out


def test_a_part_without_time_left_is_not_begun(tmp_path: Path) -> None:
    status, _, facts = script(tmp_path, "--parts", "training", "--limit", "10")
    (part,) = facts["parts"]
    assert (part["status"], part["rows"]) == ("no time left", [])
    assert status == 1, "nothing was measured"
    assert facts["is_finished"]
