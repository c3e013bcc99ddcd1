"""Timers around existing callables, and the measured overhead of such timers."""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CALIBRATION_CALLS = 4000


class Clock:
    """Exclusive time per name: time of nested wrapped calls belongs to the inner one."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.inner_calls: Counter[str] = Counter()  # wrapped calls made directly by a name
        self._wait = wait  # synchronises an asynchronous device
        self._stack: list[list[Any]] = []  # name, seconds of inner calls

    def wrap(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, timed under `name`."""
        stack, seconds, wait = self._stack, self.seconds, self._wait

        def timed(*args: Any, **options: Any) -> Any:
            frame: list[Any] = [name, 0.0]
            stack.append(frame)
            start = time.perf_counter()
            try:
                result = work(*args, **options)
                if wait:
                    wait()
                return result
            finally:
                spent = time.perf_counter() - start
                stack.pop()
                seconds[name] += spent - frame[1]
                self.calls[name] += 1
                if stack:
                    stack[-1][1] += spent
                    self.inner_calls[stack[-1][0]] += 1

        return timed

    def corrected(self, cost: tuple[float, float]) -> dict[str, float]:
        """Seconds by name minus the timers' cost (within a call, in its caller)."""
        return {
            name: max(0.0, spent - cost[0] * self.calls[name] - cost[1] * self.inner_calls[name])
            for name, spent in self.seconds.items()
        }

    def overhead(self, cost: tuple[float, float]) -> float:
        """Total seconds of the timers themselves."""
        return cost[0] * self.calls.total() + cost[1] * self.inner_calls.total()


def calibrate(num_calls: int = CALIBRATION_CALLS) -> tuple[float, float]:
    """Seconds per call that a timer adds to its own name and to its caller."""

    def nothing(x: object) -> None:
        return None

    def loop(work: Callable[[object], None]) -> None:
        for i in range(num_calls):
            work(i)

    clock = Clock()
    bare = min(seconds_of(lambda: loop(nothing)) for _ in range(5))
    found = []
    for _ in range(5):
        clock.seconds.clear()
        clock.wrap("outer", loop)(clock.wrap("inner", nothing))
        found.append((clock.seconds["inner"], clock.seconds["outer"]))
    inner, outer = min(found, key=sum)
    return inner / num_calls, max(outer - bare, 0.0) / num_calls


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def freeze_old_objects() -> Iterator[None]:
    """Limits garbage collection to objects created inside the block.

    A full collection takes a sixth of a second and would be counted in an unrelated part.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Patches:
    """Replaces attributes by timers and restores them at the end of the block."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __call__(self, owner: Any, name: str, label: str, clock: Clock) -> None:
        """Times `owner.name` under `label`."""
        self._set(owner, name, clock.wrap(label, getattr(owner, name)))

    def calls(self, cls: type, labels: dict[int, str], clock: Clock) -> None:
        """Times calls of the instances of a class by id.

        Patches the class, as instances may have slots.
        """
        original = cls.__call__  # type: ignore[operator]
        timers = {label: clock.wrap(label, original) for label in dict.fromkeys(labels.values())}

        def call(self: Any, *args: Any, **options: Any) -> Any:
            label = labels.get(id(self))
            if label is None:
                return original(self, *args, **options)
            return timers[label](self, *args, **options)

        self._set(cls, "__call__", call)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        missing = object()
        before = vars(owner).get(name, missing) if hasattr(owner, "__dict__") else missing

        def undo() -> None:
            if before is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self._undo.append(undo)

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_: Any) -> None:
        while self._undo:
            self._undo.pop()()
