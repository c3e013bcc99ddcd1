"""Progress of a long command: bars on a terminal, otherwise lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import typer


class Display:
    """Displays the progress of a recipe; `draw` is a `training.progress.Watch`."""

    def __init__(
        self,
        every: float = 30.0,  # seconds between lines
        is_terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description}")
        self.bars = Progress(
            text, BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
        )
        self.tasks: dict[str, Any] = {}
        self.every, self.clock = every, clock
        self.is_terminal = sys.stdout.isatty() if is_terminal is None else is_terminal
        self.printed: dict[str, float] = {}  # time of each title's last line

    def __enter__(self) -> Display:
        if self.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_terminal:
            self.bars.stop()

    def draw(self, title: str, share: float, note: str) -> None:
        """Updates the bar of a title, or prints a line every `every` seconds."""
        if not self.is_terminal:
            self._print(title, share, note)
            return
        if title not in self.tasks:
            self.tasks[title] = self.bars.add_task(title, total=1.0, note="")
        self.bars.update(self.tasks[title], completed=min(1.0, share), note=note)

    def _print(self, title: str, share: float, note: str) -> None:
        now = self.clock()
        if title not in self.printed or share >= 1 or now - self.printed[title] >= self.every:
            self.printed[title] = now
            typer.echo(f"{title}  {min(1.0, share):.0%}  {note}")
