"""What tests of the command line share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

Call = Callable[..., tuple[int, str, str]]
HEAVY = ("torch", "numba", "transformers", "numpy")
CAT = ("--prompt", "the cat sat on")


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n") if line]


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    paths = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def interrupted(*words: Any) -> str:
    """What a command prints that gets Ctrl-C after its first line, and ends as it should."""
    process = subprocess.Popen(
        [sys.executable, "-m", "forerun.cli.main", *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        # not by `communicate`, which misses what was read ahead of the first line
        rest, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    return first + rest
