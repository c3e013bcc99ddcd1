"""Finds records disturbed by another program: lost cores, slow memory, memory pressure.

No rule looks at the method. Counts, rates and scores use all records; times use `undisturbed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from forerun.bench.results import Record

MAX_SLOWDOWN_OF_READS = 1.5  # quiet reading speed over that of a record
MAX_EXTRA_LOSS = 0.1  # share of the cores lost, above that of quiet moments
MAX_NEIGHBOUR_DISTANCE = 2  # records that replace the loss of a short one


def undisturbed(records: Sequence[Record]) -> list[Record]:
    """Records with valid times, in the same order.

    Records under memory pressure are dropped first, then those that lost cores, then those with
    slow memory. A rule that would leave less than half of what a method did of a task drops nothing
    of that task. Records of methods that alternated are kept.
    """
    kept = list(records)
    short = [record.is_short_of_memory for record in records]
    for spoiled in short, lost_cores(records), slow_memory(records):
        pairs = zip(records, spoiled, strict=True)
        bad = {id(r) for r, is_bad in pairs if is_bad and not r.is_shared}
        left = Counter(_task_and_method(r for r in kept if id(r) not in bad))
        total = Counter(_task_and_method(records))
        exempt = {key[0] for key, count in total.items() if 2 * left[key] < count}
        kept = [r for r in kept if r.task in exempt or id(r) not in bad]
    return kept


def _task_and_method(records: Iterable[Record]) -> list[tuple[str, str]]:
    return [(r.task, r.method) for r in records if r.error is None]


def disturbed(records: Sequence[Record]) -> list[bool]:
    """For each record, whether the machine was busy or short of memory."""
    pairs = zip(records, busy(records), strict=True)
    return [is_busy or (r.error is None and r.is_short_of_memory) for r, is_busy in pairs]


def busy(records: Sequence[Record]) -> list[bool]:
    """For each record, whether it lost cores or memory was slow; False for failures."""
    return [a or b for a, b in zip(lost_cores(records), slow_memory(records), strict=True)]


def lost_cores(records: Sequence[Record]) -> list[bool]:
    """For each record, whether it lost MAX_EXTRA_LOSS more of the cores than in quiet moments.

    Quiet is the 10th percentile; 0 if less than a tenth of the records measured it. A record too
    short to measure takes the smaller loss of its nearest measured neighbours on both sides.
    """
    losses = limits_of(records, "taken")
    is_known = len(losses) >= 0.1 * len(records) > 0
    limit = (float(np.quantile(losses, 0.1)) if is_known else 0.0) + MAX_EXTRA_LOSS
    measured = [(r.limits or {}).get("taken") for r in records]
    reach = MAX_NEIGHBOUR_DISTANCE + 1
    loss = [
        min(_first_known(measured[i::-1][:reach]), _first_known(measured[i : i + reach]))
        for i in range(len(measured))
    ]
    return [r.error is None and lost > limit for r, lost in zip(records, loss, strict=True)]


def _first_known(values: Iterable[float | None]) -> float:
    return next((value for value in values if value is not None), 0.0)


def slow_memory(records: Sequence[Record]) -> list[bool]:
    """For each record, whether memory was slow before it or before the next one.

    Slow is below the run's quiet speed, its 90th percentile, over MAX_SLOWDOWN_OF_READS.
    """
    reads = limits_of(records, "read_gb_s")
    least = float(np.quantile(reads, 0.9)) / MAX_SLOWDOWN_OF_READS if reads else 0.0
    slow = [(r.limits or {}).get("read_gb_s", least) < least for r in records]
    triples = zip(records, slow, [*slow, False][1:], strict=True)
    return [r.error is None and (before or after) for r, before, after in triples]


def limits_of(records: Iterable[Record], name: str) -> list[float]:
    """The known values of one limit."""
    return [r.limits[name] for r in records if r.limits and name in r.limits]
