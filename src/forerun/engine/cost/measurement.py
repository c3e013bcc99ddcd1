"""Seconds of several kinds of work: read from the cache, or measured within a time limit.

What a limit does not reach is infinite; a later call measures it first. Cached times are valid
until a check finds the same work clearly faster: they are then those of a busy machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from time import perf_counter
from typing import Generic, TypeVar

from forerun.core.roles import Target
from forerun.engine.cost import cache

MIN_TRIES = 7  # of each kind of work, as far as time allows
CHECK_TRIES = 3
MIN_CHECK_RATIO = 0.85  # measured over cached time; below it the cache is outdated
FREE_ROWS = 4  # a pass over R rows takes at most 1 + R / FREE_ROWS passes over one

Kind = TypeVar("Kind")
Limits = tuple[float, float]  # min and max seconds of one measurement


class Measurement(Generic[Kind]):
    """Seconds of each kind of work with a target.

    `measure` returns seconds of kinds for a number of tries and limits.
    """

    def __init__(
        self,
        target: Target,
        name: str,
        kinds: list[Kind],
        measure: Callable[[Many[Kind], int, Limits], list[float]],
    ) -> None:
        self.kinds, self._measure = kinds, measure
        self._path = cache.path_of(target, name)
        self.seconds = cache.read(self._path, kinds) or [math.inf] * len(kinds)

    @property
    def is_complete(self) -> bool:
        """Whether every kind has a time."""
        return all(map(math.isfinite, self.seconds))

    def run(self, limits: Limits) -> None:
        """Measures all kinds, those without a time first, and writes the cache."""
        order = sorted(range(len(self.kinds)), key=lambda i: math.isfinite(self.seconds[i]))
        found = self._measure([self.kinds[i] for i in order], MIN_TRIES, limits)
        for i, seconds in zip(order, found, strict=True):
            self.seconds[i] = min(self.seconds[i], seconds)
        cache.write(self._path, self.kinds, self.seconds)

    def is_outdated(self, limits: Limits) -> bool:
        """Whether two of the kinds are now clearly faster."""
        checked = [0, len(self.kinds) // 2]
        now = self._measure([self.kinds[i] for i in checked], CHECK_TRIES, limits)
        pairs = zip(checked, now, strict=True)
        return any(found < MIN_CHECK_RATIO * self.seconds[i] for i, found in pairs)


def min_seconds(
    works: Many[Callable[[], float]],
    sizes: Many[int],
    tries: int,
    limits: Limits,
    *,
    is_slow_at_first: bool = False,
) -> list[float]:
    """The minimum seconds of each work; tries are interleaved, so noise affects all works.

    sizes: rows of each work. Infinite for a work for which the time left is too short; the first
    one always runs. is_slow_at_first: the first try of each work is not counted.
    """
    found, taken, started = [math.inf] * len(works), [math.inf] * len(works), perf_counter()
    (least, most), rounds, elapsed, has_run = limits, 0, 0.0, True
    while has_run and (not rounds or elapsed < most and (rounds < tries or elapsed <= least)):
        rounds, has_run = rounds + 1, False
        for i, work in enumerate(works):
            is_new = not math.isfinite(found[i])
            num_runs = 1 + (is_new and is_slow_at_first)
            begun = perf_counter()
            end = begun - started + num_runs * _expected(taken, sizes, i)
            if end > most and (i or rounds > 1):
                continue
            if num_runs > 1:
                work()
            found[i] = min(found[i], work())
            taken[i], has_run = (perf_counter() - begun) / num_runs, True
        elapsed = perf_counter() - started
    return found


def _expected(taken: Many[float], sizes: Many[int], i: int) -> float:
    """The seconds that work i takes at most, by those that others have taken."""
    if math.isfinite(taken[i]):
        return taken[i]
    known = [(n, s) for n, s in zip(sizes, taken, strict=True) if math.isfinite(s)]
    more = [s for n, s in known if n >= sizes[i]]
    less = [s * min(sizes[i] / n, 1 + sizes[i] / FREE_ROWS) for n, s in known if n < sizes[i]]
    return min(more + less, default=0.0)
