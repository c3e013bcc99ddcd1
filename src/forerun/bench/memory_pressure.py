"""Memory pressure during a measurement: swapped pages, stalled time, major page faults.

Read from Linux counters; other systems report none. Without swap, a machine short of memory drops
the pages of programs and weights and reads them again, which shows as major faults and stalls.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

from forerun.bench import cpu_load, machine
from forerun.bench.results import SHORT_OF_MEMORY

PROC = Path("/proc")
MAJOR_FAULTS = 9  # column of /proc/PID/stat after the name
# Thresholds of a measurement under memory pressure:
MIN_SWAPPED = 4 << 20  # bytes moved to or from swap
MIN_STALLED = 0.05  # share of the time in which a program waited for memory
MIN_FAULT_RATE = 100.0  # major faults of our processes per second
MIN_AVAILABLE = 0.02  # share of the machine's memory
TOTAL = re.compile(r"^some .*total=(\d+)", re.M)


@dataclass(frozen=True)
class Sample:
    """Counters since boot, and available memory; -1 if unknown."""

    swapped: int  # bytes
    stalled: float  # seconds in which a program waited for memory
    faults: int  # major ones of this process and its children
    available: int  # bytes


def sample(proc: Path | None = None) -> Sample:
    """The counters now."""
    proc = proc or PROC
    values = machine.first_values(proc / "vmstat", " ")
    swapped = sum(int(values.get(name, 0)) for name in ("pswpin", "pswpout"))
    stalled = 0.0
    with suppress(OSError):
        found = TOTAL.search((proc / "pressure" / "memory").read_text())
        stalled = int(found[1]) / 1e6 if found else 0.0
    faults = sum(cpu_load.process_tree(slice(MAJOR_FAULTS, MAJOR_FAULTS + 1)).values())
    return Sample(swapped * PAGESIZE, stalled, faults, _available(proc))


def pressure_between(before: Sample, after: Sample, seconds: float) -> dict[str, float]:
    """The counters of a measurement under memory pressure; empty without pressure.

    memory_stalled (share of the time), swapped_bytes, major_faults, available_bytes (lowest).
    """
    swapped = after.swapped - before.swapped
    stalled = min(1.0, (after.stalled - before.stalled) / max(seconds, 1e-9))
    faults = max(0, after.faults - before.faults)  # ended processes are not counted
    least = min(before.available, after.available)
    is_short = (
        swapped >= MIN_SWAPPED
        or stalled >= MIN_STALLED
        or faults >= MIN_FAULT_RATE * max(seconds, 1.0)
        or 0 <= least < MIN_AVAILABLE * machine.memory_bytes()
    )
    if not is_short:
        return {}
    return {
        SHORT_OF_MEMORY: round(max(stalled, 0.0), 4),
        "swapped_bytes": max(swapped, 0),
        "major_faults": faults,
        "available_bytes": max(least, 0),
    }


def _available(proc: Path) -> int:
    words = machine.first_values(proc / "meminfo").get("MemAvailable", "").split()
    return int(words[0]) * 1024 if words else -1
