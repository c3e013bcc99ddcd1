"""Progress of training: the callback of recipes, and the text of its figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from forerun.utils.text import time_left

Watch = Callable[[str, float, str], None]  # called with a title, the share done, a note


class Counts(Protocol):
    """The shown fields of `loop.Progress`."""

    step: int
    seconds: float
    tokens: int
    loss: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        ...


def silent(title: str, share: float, note: str) -> None:
    """The default `Watch`: shows nothing."""


def counted(watch: Watch, title: str, unit: str) -> Callable[[int, int], None]:
    """A callback (done, total) that reports progress with the estimated time left.

    The first work that is reported is not in the rate: it includes compilation.
    """
    marks = list[tuple[int, float]]()  # done and time at the first two reports

    def show(done: int, total: int) -> None:
        now = time.monotonic()
        if not marks or (len(marks) == 1 and done > marks[0][0]):
            marks.append((done, now))
        before, start = marks[-1]
        made, left = done - before, total - done
        note = f"{done}/{total} {unit}"
        if made and left:
            note += f"  {time_left((now - start) / made * left)}"
        watch(title, done / total, note)

    return show


def step_note(p: Counts, spent: float) -> tuple[float, str]:
    """Share of the budget, and a line of figures for `Watch`."""
    left = max(0.0, p.seconds * (1 - spent) / spent) if spent > 0 else None
    return spent, (
        f"step {p.step}  {p.tokens / 1e6:.2f} M tokens  {p.rate:,.0f} tokens/s  "
        f"loss {p.loss:.3f}  {time_left(left)}"
    )
