"""What the scripts of `benchmarks/` share: types of their options, and a quiet end."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from subprocess import CalledProcessError
from typing import NoReturn

from forerun.errors import ForerunError, in_a_line


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


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script and ends the process with its status.

    2 and a line for what its user can mend, that of a command which failed and said why, 130 and a
    line for Ctrl-C.
    """
    try:
        status = main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except CalledProcessError as error:
        print(f"error: a command ended with status {error.returncode}", file=sys.stderr)
        status = error.returncode
    except (ForerunError, OSError) as error:
        print(f"error: {in_a_line(error, 2000)}", file=sys.stderr)
        status = 2
    sys.exit(status)
