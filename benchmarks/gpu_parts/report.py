"""Rows that a part reports while it runs, one JSON line each, so that a killed part keeps its rows.

A row has a name, a value with a unit, and perhaps a goal: the least or the most that is wanted.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Value = float | int | str


@dataclass(frozen=True)
class Row:
    """One measured quantity."""

    name: str
    value: Value
    unit: str = ""
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def goal(self) -> str:
        """The goal as text; empty without one."""
        if self.least is not None:
            return f">= {self.least:g}"
        return "" if self.most is None else f"<= {self.most:g}"

    @property
    def verdict(self) -> str:
        """Whether the goal is met; empty without one."""
        if not self.goal:
            return ""
        if not isinstance(self.value, int | float) or not math.isfinite(self.value):
            return "MISSED"
        low = -math.inf if self.least is None else self.least
        high = math.inf if self.most is None else self.most
        return "met" if low <= self.value <= high else "MISSED"


class OutOfTime(Exception):
    """A part has used up its seconds; the rows so far count."""


class Report:
    """The file that one part writes its rows to, and its time limit.

    is_timed: whether goals of speed are compared; on a CPU they are not.
    """

    def __init__(self, path: Path, seconds: float, *, is_timed: bool = True) -> None:
        self.path, self._end, self.is_timed = path, time.monotonic() + seconds, is_timed

    def add(self, name: str, value: Value, unit: str = "", **more: Any) -> Row:
        """Writes a row now. more: least, most, note."""
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)  # JSON has no such numbers
        row = Row(name, value, unit, **more)
        self._write({"row": asdict(row)})
        return row

    def speed(
        self,
        name: str,
        value: Value,
        unit: str = "",
        *,
        least: float | None = None,
        most: float | None = None,
        note: str = "",
    ) -> Row:
        """Writes a row with a goal of speed."""
        goal = {"least": least, "most": most} if self.is_timed else {}
        return self.add(name, value, unit, note=note, **goal)

    def fact(self, **facts: Any) -> None:
        """Writes other results: the machine, a whole curve, the lines of a profile."""
        self._write({"fact": facts})

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self._end - time.monotonic()

    def check(self, needed: float = 0.0) -> None:
        """Raises OutOfTime unless `needed` seconds are left."""
        if self.left <= needed:
            raise OutOfTime

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows and facts that a part has written; a line cut off by a signal is dropped.

    A later row replaces an earlier one of the same name.
    """
    rows: dict[str, Row] = {}
    facts: dict[str, Any] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "row" in line:
            rows[line["row"]["name"]] = Row(**line["row"])
        facts |= line.get("fact", {})
    return list(rows.values()), facts
