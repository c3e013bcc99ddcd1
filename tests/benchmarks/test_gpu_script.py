"""benchmarks/gpu.py: a part that hangs, crashes or fails has a row, and later parts still run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
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
HANGING = "report.add('read', 2.5); print('measured', flush=True); import signal; signal.pause()"


def begun(folder: Path, *words: str, **bodies: str) -> subprocess.Popen[str]:
    """Starts a copy of the script with stand-ins for its parts."""
    shutil.copytree(FOLDER, folder / "benchmarks")
    for name, body in (STAND_INS | bodies).items():
        text = f"def run(report, setting):\n    {body}\n"
        (folder / "benchmarks" / "gpu_parts" / f"{name}.py").write_text(text)
    command = [sys.executable, str(folder / "benchmarks" / "gpu.py"), "--smoke"]
    return subprocess.Popen(
        [*command, "--out", str(folder / "out"), *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def script(folder: Path, *words: str, **bodies: str) -> tuple[int, str, dict]:
    """Runs it to its end; status, output, gpu.json."""
    process = begun(folder, *words, **bodies)
    out, err = process.communicate(timeout=600)
    assert (folder / "out" / "gpu.json").exists(), err
    return process.returncode, out, json.loads((folder / "out" / "gpu.json").read_text())


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
    status, _, facts = script(tmp_path, "--parts", "training", "--limit", "15")
    (part,) = facts["parts"]
    assert (part["status"], part["rows"]) == ("no time left", [])
    assert status == 1, "nothing was measured"
    assert facts["is_finished"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_all_processes_and_keeps_what_was_measured(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = begun(tmp_path, "--parts", "passes", passes=HANGING)
    log = tmp_path / "out" / "gpu.log"
    end = time.monotonic() + 120
    while "measured" not in (log.read_text() if log.exists() else "") and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err == f"interrupted; results so far in {tmp_path / 'out'}\n"
    facts = json.loads((tmp_path / "out" / "gpu.json").read_text())
    (part,) = facts["parts"]
    assert (part["status"], facts["is_finished"]) == ("interrupted", False)
    assert [(row["name"], row["value"]) for row in part["rows"]] == [
        ("read", 2.5),
        ("stopped", "by a signal"),
    ]
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path / "benchmarks") not in listed


@pytest.mark.slow
def test_the_limit_holds_while_the_model_is_not_ready(tmp_path: Path) -> None:
    """The wait for `prepare` counts."""
    names = "decoding,training"
    _, _, facts = script(tmp_path, "--parts", names, "--limit", "30", prepare=HANGING)
    assert facts["is_finished"] and facts["seconds"] <= 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--out", "{folder}/file"), "error: cannot write results to {folder}/file: File exists"),
        (("--parts", "passes,pass"), "argument --parts: unknown part 'pass'; use correctness,"),
        (("--parts", "passes=3"), "argument --parts: passes=3 is too short; a part needs at least"),
        (("--limit", "-1"), "argument --limit: expected a number not below 0, got '-1'"),
    ],
)
def test_bad_options_are_refused(words: tuple[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = begun(tmp_path, *(word.format(folder=tmp_path) for word in words))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert message.format(folder=tmp_path) in err


@pytest.mark.slow
def test_the_smoke_run_passes_every_part(tmp_path: Path) -> None:
    """The real parts with tiny sizes, in the interpreter; their limits allow for a busy machine."""
    pytest.importorskip("triton")
    parts = "correctness=400,passes=200,decoding=400,hosttime=300,training=100,tests=100"
    command = [sys.executable, str(FOLDER / "gpu.py"), "--smoke", "--parts", parts]
    done = subprocess.run(
        [*command, "--limit", "1500", "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=1600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MISSED" not in done.stdout
    facts = json.loads((tmp_path / "gpu.json").read_text())
    assert [part["status"] for part in facts["parts"]] == ["done"] * 6, done.stdout
