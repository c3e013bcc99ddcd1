"""Number of threads of a pass: all, or fewer while other programs occupy cores.

The threads of a pass wait for each other in every layer, so one descheduled thread delays all. If
another program occupies one of two cores, a pass on two threads takes at least twice as long as on
one. The results are the same bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # not a Unix
    getrusage = None  # type: ignore[assignment]

EXACT_ROWS = 64  # up to here, compare only passes of equal rows; above: of similar rows
WINDOW_SECONDS = 0.04  # of passes judged together: several scheduler time slices
SLOW_FACTOR = 2.2  # times the best; on an idle machine half of the threads take at most 2 times
MIN_HALTS = 3  # context switches of threads in a pass
REST_FACTOR = 40  # pause after a failed trial, times its seconds
SUCCESS_SHARE = 0.9  # of the time before: a trial succeeded
BEST_GROWTH = 1.001  # growth of the best time per pass, as texts grow longer


class ThreadCount:
    """Halves the threads for a trial when passes are slow, and doubles them again."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._most = 0  # available threads
        self._best: dict[int, float] = {}  # fewest seconds per row, by rows
        self._halved = self._tried = 0  # number of halvings, now and in the trial
        self._before = 1.0  # slowness of passes before the trial
        self._next = 0.0  # earliest time of the next trial
        self._start = 0.0  # time of the pass
        self._reset_window()

    def _reset_window(self) -> None:
        self._spent = self._due = 0.0  # seconds of late passes, and at best
        self._passes, self._switches = 0, _switches()

    def size(self, most: int) -> int:
        """Threads of the next pass."""
        if most != self._most:  # times of another number are not comparable
            ThreadCount.__init__(self, self._clock)
            self._most = most
        self._start = self._clock()
        return max(most >> self._tried, 1)

    def took(self, rows: int) -> None:
        """Records the end of a pass over so many rows."""
        now = self._clock()
        seconds = now - self._start
        like = rows if rows <= EXACT_ROWS else -rows.bit_length()
        best = self._best.setdefault(like, seconds / rows)
        if self._tried == self._halved:  # best times are not updated during a trial
            best = self._best[like] = min(BEST_GROWTH * best, seconds / rows)
        self._spent, self._due = self._spent + seconds, self._due + best * rows
        self._passes += 1
        if self._spent >= WINDOW_SECONDS:
            self._decide(now, self._spent / self._due)
            self._reset_window()

    def _decide(self, now: float, slowness: float) -> None:
        """Starts or ends a trial, judging by the last passes."""
        if self._tried != self._halved:
            if slowness < SUCCESS_SHARE * self._before:
                self._halved = self._tried
            else:
                self._tried, self._next = self._halved, now + REST_FACTOR * self._spent
        elif now >= self._next:
            self._before = slowness
            halts = (_switches() - self._switches) / self._passes
            if self._most >> self._halved > 1 and (slowness > SLOW_FACTOR or halts > MIN_HALTS):
                self._tried = self._halved + 1
            elif self._halved:
                self._tried = self._halved - 1


def _switches() -> int:
    """Context switches of this process's threads so far."""
    return 0 if getrusage is None else getrusage(RUSAGE_SELF).ru_nivcsw
