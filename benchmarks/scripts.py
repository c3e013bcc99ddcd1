"""What the benchmark scripts share: types of options, and the exit status."""

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

SKIPPED = 77  # exit status: something needed is missing; `make bench` goes on


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
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the description as it is, and the defaults of described options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, "", []):
            return action.help
        return super()._get_help_string(action)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the docstring of a script as its description."""
    return argparse.ArgumentParser(description=doc, formatter_class=_Help)


def skip(why: str) -> NoReturn:
    """Ends a script that cannot run here."""
    sys.exit(end(f"skipped: {why}", SKIPPED))


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script and ends the process with its status.

    2: an error that the user can fix, with one line; 130: Ctrl-C; 141: the reader of the output has
    closed the pipe; otherwise the status of a command that failed.
    """
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = end("interrupted", 130)
    except BrokenPipeError:  # the reader closed the pipe, like `head`
        drop_output()
        status = 141
    except CalledProcessError as error:
        status = _of_command(error.returncode)
    except (ForerunError, OSError) as error:
        status = end(f"error: {in_a_line(error, 2000)}", 2)
    sys.exit(status)


def _of_command(code: int) -> int:
    """Prints how a command ended; returns its status, 128 + n for signal n, and never SKIPPED."""
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    status = 128 - code if code < 0 else 1 if code == SKIPPED else code
    return end(f"error: a command ended {how}", status)
