"""A fair, reentrant lock that tolerates Ctrl-C and finalizers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any

log = logging.getLogger("forerun")

if TYPE_CHECKING:  # RLock is a class written in C

    class Lock:
        def acquire(self, blocking: bool = True) -> bool: ...
        def release(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def _is_owned(self) -> bool: ...
else:
    Lock: Any = type(RLock())


class FairLock(Lock):
    """A reentrant lock for `with`.

    Fair, unlike RLock: a thread that releases it queues behind the threads that wait. It is safe
    against Ctrl-C and finalizers: release is one C call, and an interrupt after the lock was
    acquired releases it.
    """

    def __init__(self) -> None:
        self._queue = RLock()  # reentrant: a finalizer may run while its thread waits here
        self._pending: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        is_reentry = self._is_owned()
        try:
            if is_reentry:
                self.acquire()  # does not wait, so an exception here comes after it
            else:
                with self._queue:
                    self.acquire()
                if self._pending:
                    self._run_pending()
        except BaseException:
            if is_reentry or self._is_owned():
                self.release()
            raise

    def run_when_free(self, work: Callable[[], object]) -> None:
        """Runs work under the lock: now if it is free, else when a thread next acquires it.

        Never waits, so finalizers may call it in any thread. Errors of deferred work are logged.
        Work that a Ctrl-C interrupts runs again, so it must be safe to repeat.
        """
        self._pending.append(work)
        if self._is_owned():
            return
        try:
            if not self.acquire(blocking=False):
                return
            self._run_pending(work)
        except BaseException:
            if self._is_owned():
                self.release()
            raise
        self.release()

    def _run_pending(self, own: Callable[[], object] | None = None) -> None:
        """Runs all pending work; raises only the errors of `own`."""
        while self._pending:
            work = self._pending[0]  # removed only when done: an interrupt must not lose it
            try:
                work()
            except Exception:
                if work is own:
                    self._pending.popleft()
                    raise
                log.exception("deferred clean-up of an earlier call failed")
            self._pending.popleft()

    def __reduce__(self) -> tuple[type[FairLock], tuple[()]]:
        return FairLock, ()  # a copy of its owner gets a new lock
