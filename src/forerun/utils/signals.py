"""Ctrl-C and its kin as it suits: after a block, by another answer, or never in other processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

KIN = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def answers() -> dict[int, Callable[[int, Any], Any]]:
    """Who answers Ctrl-C and its kin in this process, by number; not those that are ignored."""
    found = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, *KIN)}
    return {kind: answer for kind, answer in found.items() if callable(answer)}


@contextmanager
def answered(answer: Callable[[int], object]) -> Iterator[None]:
    """Ctrl-C and its kin call `answer` in the block, with their number.

    One that is ignored, or left to the system, stays so.
    """
    before, is_over = answers() if _is_main_thread() else {}, False

    def hear(number: int, frame: Any) -> object:
        return before[number](number, frame) if is_over else answer(number)

    try:
        for kind in before:
            signal.signal(kind, hear)
        yield
    finally:
        is_over = True  # nor is one lost that comes while another ends this loop
        for kind, own in before.items():
            signal.signal(kind, own)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and its kin wait for the end of the block, also of one that fails.

    They are answered then, the last first, each whatever another's answer raises; only a Ctrl-C
    that comes while they are may leave some unanswered.
    """
    with ExitStack() as later, answered(lambda kind: later.callback(signal.raise_signal, kind)):
        yield


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
