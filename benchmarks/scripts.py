"""What the benchmark scripts share: types of options, the exit status, saved rows, tables."""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, NoReturn

from forerun.cli._stdio import drop_output, end
from forerun.errors import ForerunError, in_a_line

Row = dict[str, Any]
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


@dataclass
class Store:
    """Rows of one part by key, in a JSON file that is written after every row.

    Rows made with other options stay in a file *.earlier.json.
    """

    file: Path
    options: dict[str, Any]
    rows: dict[str, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file.exists():
            found = json.loads(self.file.read_text())
            if found["options"] == self.options:
                self.rows = found["rows"]
            elif found["rows"]:
                self.file.replace(self.file.with_suffix(".earlier.json"))

    def row(self, key: str, make: Callable[[], Row]) -> Row:
        """The row of a key; made and saved if it is new."""
        if key not in self.rows:
            self.rows[key] = make()
            self.save()
        return self.rows[key]

    def by_seed(self, key: str, num: int, make: Callable[[int], Row]) -> list[Row]:
        """The rows of the seeds 0 to num - 1."""
        return [self.row(f"{key}, seed {seed}", partial(make, seed)) for seed in range(num)]

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = {"options": self.options, "rows": self.rows}
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        part.replace(self.file)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A markdown table; the first column is text, the others are numbers."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(shown, line)) + " |" for line in lines)


def shown(value: Any) -> str:
    """A cell: three significant digits, "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
