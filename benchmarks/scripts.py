"""What the scripts here share: types of their options, and how they end."""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
from collections.abc import Callable
from subprocess import CalledProcessError
from typing import NoReturn

from forerun.cli._stdio import drop_output, end
from forerun.errors import ForerunError, in_a_line

SKIPPED = 77  # exit status: what is needed is not here, and `make bench` goes on


def count(text: str) -> int:
    """An option that is a whole number above 0."""
    return _whole(text, 1, "above 0")


def number(text: str) -> int:
    """An option that is a whole number, 0 or more."""
    return _whole(text, 0, "not below 0")


def _whole(text: str, least: int, which: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number {which}, got {text!r}")
    return int(text)


def measure(text: str) -> float:
    """An option that is a finite number, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number not below 0, got {text!r}")
    return value


def pattern(text: str) -> re.Pattern[str]:
    """An option that is a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no pattern: {error}") from None


def skip(why: str) -> NoReturn:
    """Ends a script that lacks what it needs."""
    sys.exit(end(f"skipped: {why}", SKIPPED))


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script and ends the process with its status.

    2 and a line for what its user can mend, that of a command which failed and said why, 130 and a
    line for Ctrl-C, 141 where nobody reads the output.
    """
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = end("interrupted", 130)
    except BrokenPipeError:  # the reader has gone, as `head` does
        drop_output()
        status = 141
    except CalledProcessError as error:
        status = _of_command(error.returncode)
    except (ForerunError, OSError) as error:
        status = end(f"error: {in_a_line(error, 2000)}", 2)
    sys.exit(status)


def _of_command(code: int) -> int:
    """Tells how a command ended; as a shell, 128 and more for a signal, and never SKIPPED."""
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    status = 128 - code if code < 0 else 1 if code == SKIPPED else code
    return end(f"error: a command ended {how}", status)
