"""(f) The unit tests of the GPU code on this GPU, in the time that is left."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from .report import OutOfTime, Report
from .setting import Setting

ROOT = Path(__file__).parents[2]
FILES = (
    "test_device_copy.py",
    "test_gpu_kernels.py",
    "test_gpu_passes.py",
    "test_gpu_torchao.py",
    "test_tensor_law.py",
    "test_tensor_walk.py",
)
SMOKE_FILES = ("test_gpu_layout.py",)
COUNT = re.compile(r"(\d+) (passed|failed|error)")


def run(report: Report, setting: Setting) -> None:
    """The quick tests; then the slow ones, which are slow in the interpreter only."""
    if find_spec("pytest") is None:
        report.add("unit tests", "not run: pytest is not installed")
        return
    if setting.is_smoke:
        tests(report, "quick", SMOKE_FILES, "not slow")
        return
    tests(report, "quick", FILES, "not slow")
    tests(report, "slow", FILES, "slow")


def tests(report: Report, name: str, files: tuple[str, ...], marked: str) -> None:
    """Writes how many passed and failed; the log has the output. Raises OutOfTime."""
    report.check(1.0)
    command = [sys.executable, "-m", "pytest", "--maxfail=20", "-m", marked]
    command += ["-p", "no:cacheprovider", *(f"tests/unit/{name}" for name in files)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=report.left
        )
    except subprocess.TimeoutExpired as late:
        print(late.stdout, flush=True)
        raise OutOfTime from late
    print(done.stdout, done.stderr, flush=True)
    counts = {kind: int(num) for num, kind in COUNT.findall(done.stdout)}
    report.add(f"{name} tests passed", counts.get("passed", 0), "tests", least=1)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    report.add(f"{name} tests failed", failed if done.returncode in (0, 1) else max(failed, 1),
               "tests", most=0, note="; ".join(lines)[:300])  # fmt: skip
