"""Signal handling: Ctrl-C, SIGTERM and SIGHUP end a command with one line and status 128 + n."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forerun.cli import _stdio as streams

STOPPING = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
_received: list[int] = []  # signals since the command began


def interrupted() -> int:
    """The exit status of an interrupted command: 128 + the signal's number."""
    return 128 + (_received[0] if _received else signal.SIGINT)


@contextmanager
def as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt like Ctrl-C; ignored signals stay ignored."""
    _received.clear()

    def raise_interrupt(number: int, frame: Any) -> None:
        _received.append(number)
        signal.default_int_handler(number, frame)

    with _handled(raise_interrupt):
        yield


@contextmanager
def exit_at_once(line: str) -> Iterator[None]:
    """A signal prints `line` and ends the process, without KeyboardInterrupt.

    For imports and compilation: C code that calls Python may drop KeyboardInterrupt.
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
    """Installs a handler for signals that are not ignored; in the main thread only."""
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
