"""Ctrl-C as it suits: after a block, by another answer, or never in processes beside the first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def answered(answer: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls `answer` in the block; where it is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN or not _is_main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: answer())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block."""
    came: list[bool] = []
    with answered(lambda: came.append(True)):
        yield
    if came:
        raise KeyboardInterrupt


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that start inside ignore Ctrl-C for life: whoever started them ends them."""
    if not _is_main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_main_thread() -> bool:
    """Only there may handlers be set."""
    return threading.current_thread() is threading.main_thread()
