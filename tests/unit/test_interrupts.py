"""Ctrl-C in commands, wherever it falls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "src"


LAST = "interrupted; what was printed or written by then stays\n"


def ended(code: str, stderr: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that runs some code to its end."""
    call, env = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        call, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60
    )


FROM_C = """
import ctypes, signal, sys
from unittest.mock import patch
from forerun.cli.main import main

called_back = ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))
with patch("forerun.cli.options.check_parts", lambda **parts: called_back()):
    sys.exit(main(["generate", "--prompt", "a", "--max-new-tokens", "1"]))
"""


def test_ctrl_c_that_a_callback_from_c_drops_ends_the_command() -> None:
    """As where kernels are loaded: without what the callback was to give they would crash."""
    done = ended(FROM_C)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LAST)


AT_ONCE = """
import signal
from forerun.cli.endings import ending_at_once

with ending_at_once("over"):
    signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("code", [AT_ONCE, FROM_C])
def test_ctrl_c_ends_also_where_nothing_can_be_said(code: str) -> None:
    with open("/dev/full", "w") as full:
        assert ended(code, full).returncode == 130


IN_A_FINALIZER = """
import signal, sys, time
from unittest.mock import patch
from forerun.cli.main import main

class Dies:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def work(args):
    try:
        Dies()
        time.sleep({seconds})
    finally:
        print("cleaned up")
    return 0

with patch("forerun.cli.main._run", work):
    sys.exit(main(["methods"]))
"""


@pytest.mark.parametrize("seconds", [60, 0])
def test_ctrl_c_that_falls_into_a_finalizer_ends_the_command_as_elsewhere(seconds: int) -> None:
    """Blocks end as they should, and a command that sleeps, or is at its end, hears of it too."""
    began = time.monotonic()
    done = ended(IN_A_FINALIZER.format(seconds=seconds))
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", LAST)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_who_ends_a_command_otherwise_is_answered_as_ctrl_c(
    tmp_path: Path, name: str, ignores: bool
) -> None:
    """What was learned is saved; so it is in a job in the background, which ignores Ctrl-C."""
    memory = tmp_path / "a.mem"
    call = [sys.executable, "-m", "forerun", "generate", "--prompt", "a", "-n", "100000", "--json"]
    process = subprocess.Popen(
        [*call, "--drafter", "stand", "--memory", str(memory)],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignores else None,  # type: ignore[arg-type]
    )
    try:
        assert process.stdout and process.stdout.readline().startswith("{")
        process.send_signal(getattr(signal, name))
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and memory.exists(), said
