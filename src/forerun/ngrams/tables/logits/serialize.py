"""Packs, merges and truncates the rows of logit memories, for files.

A row is a running mean over `count` distributions. Two rows of one context are merged into their
mean weighted by counts, over the union of ids (0 if absent). The result equals that of one memory
with both texts, as long as no id was cut off. Use times are relative to each memory's last update.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from forerun.core.acceptance_prior import SNAPSHOT_BYTES, AcceptanceCounts, are_counts
from forerun.core.records import Snapshot
from forerun.errors import DataError
from forerun.ngrams.tables.logits.kernels import EMPTY_KEY, Table

MAX_COUNT = 1 << 30  # the sum of two counts fits into int32
COLUMNS = {
    "keys": np.uint64,
    "counts": np.int32,
    "stamps": np.int32,
    "ids": np.int32,
    "probs": np.float32,
}
CHANCES = ("tries", "hits")  # float32 [2, grades, ranks] each; most likely tokens, drawn tokens
OLD_CHANCES_SHAPE = (2, 6, 6)  # of older files, without levels


def row_bytes(entries: int) -> int:
    """Bytes of a row: key, count, stamp, ids and probabilities."""
    return 16 + 8 * entries


def pack(table: Table) -> Table:
    """The used slots of a table, sorted by key, with stamps 1, 2, ... in the order of use."""
    slots = np.flatnonzero(table.keys != EMPTY_KEY)
    rows = _take(table, slots[np.argsort(table.keys[slots])])
    return _ranked(rows._replace(counts=np.minimum(rows.counts, MAX_COUNT)))


def blend(parts: Many[Table]) -> Table:
    """Merges packed rows of several memories; rows of equal keys are averaged by counts."""
    rows = _stacked(parts)
    keys, first, group, sizes = np.unique(
        rows.keys, return_index=True, return_inverse=True, return_counts=True
    )
    counts = np.bincount(group, rows.counts, len(keys))
    stamps = rows.stamps[first]
    np.maximum.at(stamps, group, rows.stamps)
    ids, probs = rows.ids[first], rows.probs[first]
    several, shared = np.flatnonzero(sizes > 1), np.flatnonzero(sizes[group] > 1)
    if len(several):
        share = (rows.counts / counts[group])[shared, None]
        groups = np.searchsorted(several, group[shared])
        ids[several], probs[several] = _largest(
            groups, rows.ids[shared], share * rows.probs[shared], len(several)
        )
    counts = np.minimum(counts, MAX_COUNT).astype(np.int32)
    return _ranked(Table(keys, counts, stamps, ids, probs))


def newest(rows: Table, max_rows: int) -> Table:
    """The `max_rows` most recently used rows; ties: smaller keys."""
    if len(rows.keys) <= max_rows:
        return rows
    order = np.lexsort((rows.keys, -rows.stamps))[:max_rows]
    return _ranked(_take(rows, np.sort(order)))


def merge(snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
    """Merges snapshots into one of at most `max_bytes`. Raises ConfigError if settings differ."""
    settings = snapshots[0].settings
    for other in snapshots[1:]:
        other.check(settings)
    counts = {name: sum(s.counts[name] for s in snapshots) for name in ("tokens", "evicted")}
    parts = [from_snapshot(snapshot) for snapshot in snapshots]
    rows = blend([rows for rows, _ in parts])
    acceptance = {
        d: AcceptanceCounts.sum([part[d] for _, part in parts], drawn=d) for d in (True, False)
    }
    max_rows = len(rows.keys)
    if max_bytes is not None:
        max_rows = max(0, max_bytes - SNAPSHOT_BYTES) // row_bytes(settings["entries"])
    counts["evicted"] += max(len(rows.keys) - max_rows, 0)
    return to_snapshot(snapshots[0].kind, newest(rows, max_rows), settings, counts, acceptance)


def to_snapshot(
    kind: str,
    rows: Table,
    settings: dict[str, Any],
    counts: dict[str, int],
    acceptance: dict[bool, AcceptanceCounts],
) -> Snapshot:
    """A snapshot of packed rows and the acceptance counts of both kinds of trees."""
    arrays = rows._asdict() | {
        name: np.stack(
            [getattr(acceptance[drawn], name) for drawn in (False, True)], dtype=np.float32
        )
        for name in CHANCES
    }
    return Snapshot(kind, arrays, settings, counts | {"contexts": len(rows.keys)})


def from_snapshot(snapshot: Snapshot) -> tuple[Table, dict[bool, AcceptanceCounts]]:
    """Rows and acceptance counts of a snapshot; old files without levels give the prior counts.

    Raises DataError for invalid arrays.
    """
    columns = {name: a for name, a in snapshot.arrays.items() if name not in CHANCES}
    counts = [snapshot.arrays[name] for name in CHANCES if name in snapshot.arrays]
    if columns.keys() != COLUMNS.keys() or len(counts) == 1:
        raise DataError(
            f"expected the arrays {', '.join([*COLUMNS, *CHANCES])}, got "
            f"{', '.join(snapshot.arrays)}; use another memory file"
        )
    rows = check(Table(**columns), snapshot.settings["entries"])
    acceptance = {drawn: AcceptanceCounts(drawn=drawn) for drawn in (False, True)}
    if any(array.shape != OLD_CHANCES_SHAPE for array in counts):
        if not are_counts(*counts):
            raise DataError(
                "the trials and acceptances of draft nodes are invalid; use another memory file"
            )
        for drawn, one in acceptance.items():
            one.tries, one.hits = (a[int(drawn)].astype(np.float64) for a in counts)
    return rows, acceptance


def check(rows: Table, entries: int) -> Table:
    """The rows, if they are valid rows of `pack`. Raises DataError."""
    size = len(rows.keys)
    shapes = [(size,)] * 3 + [(size, entries)] * 2
    has_form = all(
        array.dtype == kind and array.shape == shape
        for array, kind, shape in zip(rows, COLUMNS.values(), shapes, strict=True)
    )
    if not has_form or not _are_means(rows):
        raise DataError(
            f"expected contexts with up to {entries} falling probabilities each, got invalid "
            "arrays; use another memory file"
        )
    return rows


def _are_means(rows: Table) -> bool:
    """Whether keys are sorted, counts at least 1, and probabilities falling from above 0."""
    facts = (
        rows.keys[1:] > rows.keys[:-1],
        rows.keys != EMPTY_KEY,
        (rows.counts >= 1) & (rows.counts <= MAX_COUNT),
        rows.ids >= 0,
        (rows.probs >= 0) & (rows.probs < 1.001),
        rows.probs[:, 1:] <= rows.probs[:, :-1],
        rows.probs[:, 0] > 0,
    )
    return all(bool(np.all(fact)) for fact in facts)


def _largest(
    group: np.ndarray, ids: np.ndarray, probs: np.ndarray, num_groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """The K largest sums of probs [m, K] of equal ids, per group of rows; ties by id."""
    entries, used = ids.shape[1], probs > 0
    group = np.repeat(group, entries).reshape(ids.shape)[used]
    ids, probs = ids[used], probs[used]
    order = np.lexsort((ids, group))
    group, ids, probs = group[order], ids[order], probs[order]
    starts = np.flatnonzero(np.r_[True, (np.diff(group) != 0) | (np.diff(ids) != 0)])
    group, ids = group[starts], ids[starts]
    sums = np.add.reduceat(probs, starts).astype(np.float32)
    order = np.lexsort((ids, -sums, group))
    group, ids, sums = group[order], ids[order], sums[order]
    rank = np.arange(len(group)) - np.searchsorted(group, group)
    group, rank, ids, sums = (part[rank < entries] for part in (group, rank, ids, sums))
    out_ids = np.zeros((num_groups, entries), np.int32)
    out_probs = np.zeros((num_groups, entries), np.float32)
    out_ids[group, rank], out_probs[group, rank] = ids, sums
    return out_ids, out_probs


def _stacked(parts: Many[Table]) -> Table:
    """All rows, with stamps relative to the largest of their memory."""
    aged = [part._replace(stamps=part.stamps - part.stamps.max(initial=0)) for part in parts]
    return Table(*(np.concatenate(arrays) for arrays in zip(*aged, strict=True)))


def _ranked(rows: Table) -> Table:
    """Replaces stamps by their ranks from 1, so that repeated saving never overflows them."""
    ranks = np.unique(rows.stamps, return_inverse=True)[1] + 1
    return rows._replace(stamps=ranks.astype(np.int32))


def _take(table: Table, index: np.ndarray) -> Table:
    return Table(*(array[index] for array in table))
