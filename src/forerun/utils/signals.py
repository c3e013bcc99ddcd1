"""Ctrl-C and SIGTERM: delayed for a critical block, ignored by child processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """The first Ctrl-C or SIGTERM in the block is raised at its end; a second one at once."""
    if threading.current_thread() is not threading.main_thread():  # others may not set handlers
        yield
        return
    handlers = ((number, signal.getsignal(number)) for number in STOPPING)
    before: dict[int, Any] = {number: own for number, own in handlers if callable(own)}
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1:
            before[number](number, frame)

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if len(received) == 1:
            signal.raise_signal(received[0])


@contextmanager
def ignored_by_children() -> Iterator[None]:
    """Processes started in the block ignore Ctrl-C; their parent has to stop them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
