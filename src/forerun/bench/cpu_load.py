"""Processor time of this process and of other programs, read from /proc."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from forerun.bench.machine import num_cores

MIN_LOST_SECONDS = 0.05  # resolution of the counters
MIN_METER_SECONDS = 1.0  # two ticks of 10 ms are then 2 %
IDLE_TIMEOUT_S, IDLE_POLL_S, IDLE_TICKS = 2.0, 0.1, 2  # of `wait_until_idle`
USER_AND_SYSTEM, WITH_CHILDREN = slice(11, 13), slice(11, 15)  # columns of /proc/PID/stat


def cpu_seconds() -> tuple[float, float]:
    """Busy seconds of this process's cores so far, and of this process with its children.

    (0, 0) if the system does not report them.
    """
    try:
        tick, cores = os.sysconf("SC_CLK_TCK"), {f"cpu{i}" for i in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except (OSError, AttributeError, ValueError):
        return 0.0, 0.0
    times = [list(map(int, words[1:])) for words in lines if words and words[0] in cores]
    busy = sum(sum(row[:3]) + sum(row[5:8]) for row in times)  # without idle and disk waits
    return busy / tick, sum(process_tree(WITH_CHILDREN).values()) / tick


def wait_until_idle() -> None:
    """Waits until child processes are idle, IDLE_TIMEOUT_S at most.

    Threads of a library spin for a moment after their last product.
    """
    end, before = time.perf_counter() + IDLE_TIMEOUT_S, _child_ticks()
    while before and time.perf_counter() < end:
        time.sleep(IDLE_POLL_S)
        after = _child_ticks()
        if sum(after.values()) - sum(before.get(one, 0) for one in after) <= IDLE_TICKS:
            return
        before = after


def _child_ticks() -> dict[str, int]:
    """Process id -> ticks of processor time, of every child."""
    ticks = process_tree(USER_AND_SYSTEM)
    return {pid: n for pid, n in ticks.items() if pid != str(os.getpid())}


def process_tree(columns: slice) -> dict[str, int]:
    """Process id -> sum of columns of /proc/PID/stat, of this process and its descendants."""
    parents, values = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            words = file.read_text().rpartition(")")[2].split()
            parents[file.parent.name] = words[1]
            values[file.parent.name] = sum(map(int, words[columns]))
    tree, new = set[str](), {str(os.getpid())}
    while new:
        tree |= new
        new = {child for child, parent in parents.items() if parent in new}
    return {pid: values.get(pid, 0) for pid in tree}


def lost_share(
    before: tuple[float, float], after: tuple[float, float], seconds: float, threads: int
) -> float:
    """Share of the cores for `threads` lost between two `cpu_seconds`.

    Lost to other programs, and while this process was halted: decoding keeps a core busy.
    """
    busy, ours = (end - start for start, end in zip(before, after, strict=True))
    halted = min(max(seconds - ours, 0.0), max(seconds * num_cores() - busy, 0.0))
    cores = min(threads, num_cores())
    unused = seconds * (num_cores() - cores)  # other programs may run there
    lost = max(busy - ours - unused, 0.0) + halted
    return min(lost / (seconds * cores), 1.0) if lost > MIN_LOST_SECONDS else 0.0


class CoreLossMeter:
    """Measures the share of the cores for `threads` lost from now on."""

    def __init__(self, threads: int) -> None:
        self._threads, self._before, self._start = threads, cpu_seconds(), time.perf_counter()

    def lost(self) -> float | None:
        """The share so far; None before MIN_METER_SECONDS, or if the system reports nothing."""
        seconds = time.perf_counter() - self._start
        if not self._before[0] or seconds < MIN_METER_SECONDS:
            return None
        return lost_share(self._before, cpu_seconds(), seconds, self._threads)
