"""Threads that use one thing take turns."""

from __future__ import annotations

from threading import Lock, get_ident


class Turns:
    """A lock for `with`; whoever holds it may take it again.

    It is fair, unlike Python's own: who has just had it comes after those who wait.
    """

    def __init__(self) -> None:
        self._next, self._held = Lock(), Lock()  # of who comes next, and of who has it
        self._owner, self._depth = 0, 0

    def __enter__(self) -> None:
        me = get_ident()
        if self._owner != me:
            with self._next:
                self._held.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._held.release()
