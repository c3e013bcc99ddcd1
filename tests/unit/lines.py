"""Something happens at a line of some code, as a signal may at any: traces for `sys.settrace`."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def at_line(number: int, does: Callable[[], object], *codes: CodeType) -> Callable[..., Any]:
    """Does this once, before the line of that number, from 1, that is run of any of the codes."""
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line" and next(lines) == number:
            sys.settrace(None)
            does()
        return trace

    return trace


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)
