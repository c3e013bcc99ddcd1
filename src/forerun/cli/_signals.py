"""Ctrl-C, SIGTERM and SIGHUP end a command with one line and the exit status of shells."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forerun.cli import _stdio as streams

STOPPING = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
_came: list[int] = []  # signals since the command began


def interrupted() -> int:
    """The exit status of an interrupted command: 128 and the signal's number."""
    return 128 + (_came[0] if _came else signal.SIGINT)


@contextmanager
def as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does; one that is ignored stays so."""
    _came.clear()

    def raise_interrupt(number: int, frame: Any) -> None:
        _came.append(number)
        signal.default_int_handler(number, frame)

    with _handled(raise_interrupt):
        yield


@contextmanager
def exit_at_once(line: str) -> Iterator[None]:
    """A signal prints `line` and ends the process, without KeyboardInterrupt.

    For imports and compilers: C code that calls Python drops exceptions, and nothing is lost here.
    """

    def end(number: int, frame: Any) -> None:
        try:
            streams.end(line, 128 + number)
        finally:
            os._exit(128 + number)

    with _handled(end):
        yield


@contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Installs a handler for the signals that are not ignored, in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in STOPPING if is_main}
    before = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
