"""Ctrl-C as it suits: after a block, at once, or never in the processes beside the first."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; where it is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN or not _is_main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def ending_at_once(last: str) -> Iterator[None]:
    """Ctrl-C ends the process with a last line and status 130, whatever is under way.

    For code that drops exceptions, as compilers called back from C do, and loses nothing.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN or not _is_main_thread():
        yield
        return

    before = signal.signal(signal.SIGINT, lambda number, _: _end(last))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def heeded(last: str) -> Iterator[None]:
    """A Ctrl-C that code in C drops ends the process with a last line and status 130.

    As where compilers call back: they go on without what they were to be given, and would crash.
    """
    before = sys.unraisablehook

    def hear(dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            with suppress(Exception):
                sys.stdout.flush()
            _end(last)
        before(dropped)

    sys.unraisablehook = hear
    try:
        yield
    finally:
        sys.unraisablehook = before


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


def _end(last: str) -> None:
    os.write(2, f"{last}\n".encode())
    os._exit(130)


def _is_main_thread() -> bool:
    """Only there may handlers be set."""
    return threading.current_thread() is threading.main_thread()
