"""How many threads a pass takes: all, or fewer while other programs keep processors from some.

The threads of a pass wait for each other in every layer, so one that is not let run halts them all:
where a busy program takes one of two cores, two threads need twice to many times as long for a pass
as one does. What a pass computes is the same, bit by bit.
"""

from __future__ import annotations

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # not a Unix
    getrusage = None  # type: ignore[assignment]

MOST_ROWS = 64  # of passes that are compared; larger ones are rare, and no two alike
WINDOW = 0.03, 8  # seconds and passes that are looked at together
TRIAL = 0.012, 4  # the same in a trial: some turns of a scheduler
SLOW = 2.2  # times as long as the fastest of such passes: more than half of the threads would take
HALTS = 3  # times in a pass that threads were halted, or gave way to those that were
WAITS = 0.06, 4.0  # seconds between trials, at first and at most: each that fails doubles them
BETTER = 0.9  # of the time before, for a change
FORGET = 1.001  # of the fastest time with every pass, as texts grow longer


class Crew:
    """Halves the threads of passes for a trial where they are slow, and doubles them again."""

    def __init__(self) -> None:
        self._best: dict[int, float] = {}  # the fastest seconds, by rows
        self._halved = self._tried = 0  # how often threads are halved, and in a trial
        self._before = 1.0  # how slow passes were before the trial
        self._wait = self._left = WAITS[0]  # seconds from one trial to the next, and until that one
        self._spent = self._due = 0.0  # seconds of late passes, and what they were at best
        self._passes, self._switches = 0, _switches()

    def size(self, most: int) -> int:
        """Threads of the next pass."""
        return max(most >> self._tried, 1)

    def took(self, rows: int, seconds: float, most: int) -> None:
        """How long a pass took by `size(most)` threads."""
        if rows > MOST_ROWS:
            return
        best = self._best[rows] = min(FORGET * self._best.get(rows, seconds), seconds)
        self._spent, self._due = self._spent + seconds, self._due + best
        self._passes += 1
        is_trial = self._tried != self._halved
        enough, some = TRIAL if is_trial else WINDOW
        if self._spent < enough or self._passes < some:
            return
        slowness = self._spent / self._due
        if is_trial:
            self._judge(slowness)
        elif self._left > 0:
            self._left -= self._spent
        elif self.size(most) > 1 and (slowness > SLOW or self._halts > HALTS):
            self._tried, self._before = self._halved + 1, slowness
        elif self._halved:
            self._tried, self._before = self._halved - 1, slowness
        self._begin()

    def _judge(self, slowness: float) -> None:
        """The end of a trial."""
        if slowness < BETTER * self._before:
            self._halved, self._wait = self._tried, WAITS[0]
        else:
            self._tried, self._wait = self._halved, min(2 * self._wait, WAITS[1])
        self._left = self._wait

    def _begin(self) -> None:
        """What passes take is added up anew."""
        self._spent = self._due = 0.0
        self._passes, self._switches = 0, _switches()

    @property
    def _halts(self) -> float:
        return (_switches() - self._switches) / self._passes


def _switches() -> int:
    """How often threads of this process were halted, or gave way, so far."""
    return 0 if getrusage is None else getrusage(RUSAGE_SELF).ru_nivcsw
