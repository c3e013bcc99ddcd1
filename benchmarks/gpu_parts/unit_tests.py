"""(f) The unit tests of the GPU's code on this card, in the time that is left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .report import Report
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
QUICK = ("test_gpu_layout.py",)  # of a smoke run
COUNT = re.compile(r"(\d+) (passed|failed|error)")


def run(report: Report, setting: Setting) -> None:
    """Runs them; their summary is a row, and what fails is in the log."""
    files = QUICK if setting.is_smoke else FILES
    command = [sys.executable, "-m", "pytest", "-x" if setting.is_smoke else "--maxfail=20"]
    command += ["-p", "no:cacheprovider", *(f"tests/unit/{name}" for name in files)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(report.left, 1.0)
        )
    except subprocess.TimeoutExpired as late:
        print((late.stdout or b"").decode() if isinstance(late.stdout, bytes) else late.stdout)
        raise
    print(done.stdout, done.stderr, flush=True)
    counts = {
        kind: int(num) for num, kind in re.findall(r"(\d+) (passed|failed|error)", done.stdout)
    }
    report.add("passed", counts.get("passed", 0), "tests", least=1)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    report.add("failed", failed if done.returncode in (0, 1) else max(failed, 1), "tests", most=0,
               note="; ".join(lines)[:300])  # fmt: skip
