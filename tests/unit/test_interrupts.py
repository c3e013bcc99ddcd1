"""Ctrl-C in commands, wherever it falls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def test_ctrl_c_that_a_callback_from_c_drops_ends_the_command() -> None:
    """As where kernels are loaded: without what the callback was to give they would crash."""
    code = """
import ctypes, signal, sys
from unittest.mock import patch
from forerun.cli.main import main

called_back = ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))
with patch("forerun.cli.options.check_parts", lambda **parts: called_back()):
    sys.exit(main(["generate", "--prompt", "a", "--max-new-tokens", "1"]))
"""
    call, env = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stdout == ""
    assert done.stderr == "interrupted; what was printed or written by then stays\n"
