"""How many threads a pass takes: all, or fewer while other programs keep processors from some.

The threads of a pass wait for each other in every layer, so one that is not let run halts them all:
where a busy program takes one of two cores, two threads need twice to many times as long for a pass
as one does. What a pass computes is the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # not a Unix
    getrusage = None  # type: ignore[assignment]

EXACT = 64  # rows up to which only passes of as many are compared; more: half to twice as many
WINDOW = 0.04  # seconds of passes that are looked at together: some turns of a scheduler
SLOW = 2.2  # times the best; half of the threads take up to twice as long on an idle machine
HALTS = 3  # of threads in a pass, to let others run
REST = 40  # times the seconds of a trial that failed, until the next one
BETTER = 0.9  # of the time before: a trial is a success
FORGET = 1.001  # times that the best grows with every pass, as texts grow longer


class Crew:
    """Halves the threads of passes for a trial where they are slow, and doubles them again."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._most = 0  # threads that there are
        self._best: dict[int, float] = {}  # the fewest seconds a row, by rows or their likes
        self._halved = self._tried = 0  # how often threads are halved, and in a trial
        self._before = 1.0  # how slow passes were before the trial
        self._next = 0.0  # when the next trial may begin
        self._start = 0.0  # of the pass
        self._look_anew()

    def _look_anew(self) -> None:
        self._spent = self._due = 0.0  # seconds of late passes, and at best
        self._passes, self._switches = 0, _switches()

    def size(self, most: int) -> int:
        """Threads of the next pass."""
        if most != self._most:  # times of another number do not compare
            Crew.__init__(self, self._clock)
            self._most = most
        self._start = self._clock()
        return max(most >> self._tried, 1)

    def took(self, rows: int) -> None:
        """The pass is over; it was of so many rows."""
        now = self._clock()
        seconds = now - self._start
        like = rows if rows <= EXACT else -rows.bit_length()
        best = self._best.setdefault(like, seconds / rows)
        if self._tried == self._halved:  # a trial is measured by what was known before
            best = self._best[like] = min(FORGET * best, seconds / rows)
        self._spent, self._due = self._spent + seconds, self._due + best * rows
        self._passes += 1
        if self._spent >= WINDOW:
            self._decide(now, self._spent / self._due)
            self._look_anew()

    def _decide(self, now: float, slowness: float) -> None:
        """Begins or ends a trial, as the last passes were."""
        if self._tried != self._halved:
            if slowness < BETTER * self._before:
                self._halved = self._tried
            else:
                self._tried, self._next = self._halved, now + REST * self._spent
        elif now >= self._next:
            self._before = slowness
            halts = (_switches() - self._switches) / self._passes
            if self._most >> self._halved > 1 and (slowness > SLOW or halts > HALTS):
                self._tried = self._halved + 1
            elif self._halved:
                self._tried = self._halved - 1


def _switches() -> int:
    """How often threads of this process were halted, or gave way, so far."""
    return 0 if getrusage is None else getrusage(RUSAGE_SELF).ru_nivcsw
