"""Threads that use one thing take turns."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any

log = logging.getLogger("forerun")

if TYPE_CHECKING:  # a class that is made in C: what types say of it

    class Lock:
        def acquire(self, blocking: bool = True) -> bool: ...
        def release(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def _is_owned(self) -> bool: ...
else:
    Lock: Any = type(RLock())


class Turns(Lock):
    """A lock for `with`; whoever holds it may take it again.

    It is fair, unlike Python's own: who has just had it comes after those who wait. Ctrl-C and
    finalizers may come at any moment: leaving is C code, which they cannot divide, and whoever is
    interrupted between getting the lock and saying so gives it back.
    """

    def __init__(self) -> None:
        self._next = RLock()  # of who comes next; a finalizer may run within, and want the same
        self._due: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        is_again = self._is_owned()
        try:
            if is_again:
                self.acquire()  # never waits: whatever is raised here comes after it
            else:
                with self._next:
                    self.acquire()
                if self._due:
                    self._settle()
        except BaseException:
            if is_again or self._is_owned():
                self.release()
            raise

    def soon(self, work: Callable[[], object]) -> None:
        """Does this with a turn: now where it is free, else before anything else is done with it.

        Never waits: finalizers run in any thread, whatever locks it holds, and amidst its turn. So
        what comes while another has the turn is done when somebody takes the next one, if ever; an
        error of it is logged then, and what anything but an Exception divides, as Ctrl-C, is done
        again: it must bear that.
        """
        self._due.append(work)
        if self._is_owned():
            return
        try:
            if not self.acquire(blocking=False):
                return
            self._settle(work)
        except BaseException:
            if self._is_owned():
                self.release()
            raise
        self.release()

    def _settle(self, own: Callable[[], object] | None = None) -> None:
        """Does what is due; raises errors of `own` alone."""
        while self._due:
            work = self._due[0]  # it stays until it is done
            try:
                work()
            except Exception:
                if work is own:
                    self._due.popleft()
                    raise
                log.exception("what an earlier call left could not be cleared up")
            self._due.popleft()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()  # a deep copy of what is used has turns of its own
