"""Ctrl-C ends a command also where the code that is under way would drop it, and so do its kin."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from forerun.cli import _stdio as streams
from forerun.utils.signals import KIN, answered, answers

SOON = 0.01  # seconds, in which a finalizer has ended
_came: list[int] = []  # of the kin, since a command began


def interrupted() -> int:
    """The exit status of what was interrupted, as shells have it: 128 and the signal's number."""
    return 128 + (_came[0] if _came else signal.SIGINT)


@contextmanager
def ending_at_once(line: str) -> Iterator[None]:
    """Ctrl-C and its kin end the process with a last line and their status, whatever is under way.

    For code that drops exceptions, as compilers called back from C do, and loses nothing.
    """
    with answered(lambda kind: _end_at_once(line, 128 + kind)):
        yield


@contextmanager
def ending_dropped(line: str) -> Iterator[None]:
    """A Ctrl-C that Python drops is not lost.

    Dropped by a callback from C it ends the process, with a last line and its status: compilers
    would go on without what they were to be given, and crash. Dropped by a finalizer it comes again
    in a moment, as KeyboardInterrupt, so that blocks end as they should.
    """
    before = sys.unraisablehook
    again: list[threading.Timer] = []

    def hear(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
        elif "ctypes" in (dropped.err_msg or ""):  # "... on calling ctypes callback function"
            _end_at_once(line, interrupted())
        else:  # raised here it would be dropped once more
            again.append(_sent_again())

    sys.unraisablehook = hear
    try:
        yield
        if any(timer.is_alive() for timer in again):
            raise KeyboardInterrupt
    finally:
        sys.unraisablehook = before
        for timer in again:
            timer.cancel()


@contextmanager
def kin_of_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP, as schedulers and closed terminals send them, are answered as Ctrl-C is.

    One that is ignored, as by nohup, stays so.
    """
    is_main = threading.current_thread() is threading.main_thread()
    mine = [kind for kind in KIN if is_main and signal.getsignal(kind) is signal.SIG_DFL]
    _came.clear()

    def hear(kind: int, frame: Any) -> None:
        _came.append(kind)
        signal.default_int_handler(kind, frame)

    for kind in mine:
        signal.signal(kind, hear)
    try:
        yield
    finally:
        for kind in mine:
            signal.signal(kind, signal.SIG_DFL)


def _sent_again() -> threading.Timer:
    """Ctrl-C for this thread, soon; or of its kin what is answered: jobs in the background."""
    kind = next(iter(answers()), signal.SIGINT)
    if hasattr(signal, "pthread_kill"):  # which wakes a thread that waits
        timer = threading.Timer(SOON, signal.pthread_kill, [threading.get_ident(), kind])
    else:
        timer = threading.Timer(SOON, signal.raise_signal, [kind])
    timer.daemon = True
    timer.start()
    return timer


def _end_at_once(line: str, status: int) -> NoReturn:
    try:
        streams.end(line, status)
    finally:
        os._exit(status)
