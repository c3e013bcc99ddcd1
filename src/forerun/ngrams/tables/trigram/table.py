"""Tri-gram scores M[(a, b)][c]: counted in a corpus, then raised for generated tri-grams.

"Adaptive Draft-Verification for Efficient Large Language Model Decoding", 2024 (ADED, Adaptix).
Each row keeps the largest P(c | a, b) of the corpus. `nudge` adds a constant to the entries of the
latest tri-grams, up to a cap. Rows are not renormalised: entries are scores. An immutable `base`
may be shared; a row is copied from it at its first nudge. The table doubles up to a budget, then
drops the least recently used rows. There is no back-off for unknown pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from functools import cache
from typing import NamedTuple

import numpy as np

from forerun.core.tree import Proposal
from forerun.errors import ConfigError, DataError
from forerun.ngrams.tables.logits import kernels
from forerun.ngrams.tables.logits.kernels import new_table
from forerun.ngrams.tables.trigram import count as trigram_counts
from forerun.ngrams.tables.trigram import kernels as trigram_kernels

MAX_LOAD = 0.6  # share of used slots
FIRST_SLOTS = 1024


class Rows(NamedTuple):
    """Concatenated rows of a matrix, least recently used first."""

    keys: np.ndarray  # uint64 [m]
    sizes: np.ndarray  # int64 [m]
    ids: np.ndarray  # int32 [sum of sizes], by falling score in each row, ties by id
    scores: np.ndarray  # float32 [sum of sizes]


class TrigramMatrix:
    """Rows of at most `entries` successors; a full row drops its smallest entry for a new one."""

    def __init__(
        self, *, entries: int = 12, budget: int = 64 << 20, base: TrigramMatrix | None = None
    ) -> None:
        if not 1 <= entries <= 256:
            raise ConfigError(f"entries must be in 1..256, got {entries}")
        self.entries, self.base = entries, base
        self.budget = budget  # bytes; a change takes effect at the next growth
        if self.max_slots < 128:
            raise ConfigError(
                f"a tri-gram matrix with {entries} entries per row needs at least "
                f"{128 * self.slot_bytes} bytes, got {budget}; raise the budget"
            )
        assert base is None or base.entries == entries, "rows are copied unchanged"
        self.table = new_table(min(FIRST_SLOTS, self.max_slots), entries)  # counts: row sizes
        self.below = base.table if base else new_table(2, entries)
        self.clock = 0  # one tick per nudge
        self.learned = 0  # tokens counted, and nudges
        self.dropped = 0  # rows left out or evicted
        self._size = 0

    def __len__(self) -> int:
        """Number of rows, without those of the base."""
        return self._size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: key, size, stamp, ids and scores."""
        return 16 + 8 * self.entries

    @property
    def nbytes(self) -> int:
        """Bytes of the table, without the base."""
        return len(self.table.keys) * self.slot_bytes

    @property
    def max_slots(self) -> int:
        """Slots within the budget."""
        return max(0, self.budget) // self.slot_bytes

    @property
    def max_rows(self) -> int:
        """Rows within the budget."""
        return int(MAX_LOAD * max(self.max_slots, len(self.table.keys)))

    def row(self, a: int, b: int, *, renormalise: bool = False) -> Proposal | None:
        """Successors of (a, b) by falling score, ties by id; None if the pair is unknown.

        The scores of a row sum to 1 only with `renormalise`.
        """
        place = trigram_kernels.row_of(self.table, self.below, a, b)
        if place == -1:
            return None
        table, slot = (self.table, place) if place >= 0 else (self.below, -2 - place)
        size = table.counts[slot]
        scores = table.probs[slot, :size].astype(np.float64)
        if renormalise:
            scores = scores / sum(scores.tolist())
        return Proposal(table.ids[slot, :size].copy(), scores)

    def nudge(self, tokens: Many[int], increment: float = 0.04, cap: float = 3.0) -> None:
        """M[(a, b)][c] += increment, at most `cap`, for every tri-gram of `tokens`."""
        text = np.asarray(tokens, dtype=np.int32)
        if len(text) < 3:
            return
        self.clock += 1
        self.learned += 1
        self._make_room(len(text) - 2)
        self._size += trigram_kernels.nudge(
            self.table, self.below, text, increment, cap, self.clock
        )

    def count(self, documents: Iterable[np.ndarray]) -> None:
        """Fills an empty matrix with P(c | a, b) of documents of token ids, int32.

        The most frequent pairs within the budget are kept. Raises DataError if there is no
        tri-gram.
        """
        assert not len(self), "a corpus fills an empty matrix"
        counts = trigram_counts.count(documents)
        if not len(counts.counts):
            raise DataError(
                "the corpus is too small: expected a document of 3 tokens or more, the longest of "
                f"{counts.num_documents} has {counts.longest}; add more text, or omit the corpus "
                "to learn from generated text only"
            )
        best = trigram_counts.best(counts, self.entries, self.max_rows)
        self.learned = int(counts.counts.sum())
        self.dropped = best.dropped
        self._fill(Rows(trigram_kernels.keys_of(best.pairs), best.sizes, best.ids, best.probs))

    def rows(self) -> Rows:
        """All rows, without those of the base."""
        slots = np.flatnonzero(self.table.keys)
        slots = slots[np.argsort(self.table.stamps[slots], kind="stable")]
        sizes = self.table.counts[slots].astype(np.int64)
        is_used = np.arange(self.entries) < sizes[:, None]
        ids, scores = self.table.ids[slots][is_used], self.table.probs[slots][is_used]
        return Rows(self.table.keys[slots], sizes, ids, scores)

    def absorb(self, rows: Rows) -> None:
        """Adds rows of another matrix; a tri-gram in both keeps the larger score."""
        blended = blend([self.rows(), rows], self.entries) if len(self) else rows
        kept = newest(blended, self.max_rows)
        self.dropped += len(blended.keys) - len(kept.keys)
        self._fill(kept)

    def largest_id(self) -> int:
        """The largest token id of all successors; -1 if there is none."""
        return int(self.rows().ids.max(initial=-1))

    def _fill(self, rows: Rows) -> None:
        slots = len(self.table.keys)
        while len(rows.keys) > int(MAX_LOAD * slots):
            slots = min(2 * slots, self.max_slots)
        self.table = new_table(slots, self.entries)
        trigram_kernels.fill(self.table, *rows)
        self._size, self.clock = len(rows.keys), len(rows.keys)

    def growth(self, num_new: int) -> int:
        """Bytes the table must grow by for `num_new` more rows."""
        slots = len(self.table.keys)
        return self.nbytes if self._size + num_new > MAX_LOAD * slots else 0

    def _make_room(self, num_new: int) -> None:
        """Doubles the table, or evicts the oldest quarter at the budget."""
        if not self.growth(num_new):
            return
        slots = min(2 * len(self.table.keys), self.max_slots)
        if slots > len(self.table.keys):
            larger = new_table(slots, self.entries)
            kernels.rehash(self.table, larger)
            self.table = larger
        if self.growth(num_new):
            self._evict(max(self._size // 4, num_new))

    def _evict(self, count: int) -> None:
        """Drops the `count` least recently used rows."""
        stamps = np.sort(self.table.stamps[self.table.keys != 0])
        cut = int(stamps[count - 1])
        dropped = kernels.evict(self.table, cut, count - int(np.searchsorted(stamps, cut)))
        self.dropped, self._size = self.dropped + dropped, self._size - dropped


def newest(rows: Rows, max_rows: int) -> Rows:
    """The `max_rows` most recently used rows."""
    first = max(0, len(rows.keys) - max_rows)
    cells = int(rows.sizes[:first].sum())
    return Rows(rows.keys[first:], rows.sizes[first:], rows.ids[cells:], rows.scores[cells:])


def blend(parts: Many[Rows], entries: int) -> Rows:
    """Merges sets of rows: the largest scores of each pair, with its latest use."""
    keys = np.concatenate([np.repeat(rows.keys, rows.sizes) for rows in parts])
    ages = np.concatenate(
        [np.repeat(np.arange(len(rows.keys))[::-1], rows.sizes) for rows in parts]
    )
    ids = np.concatenate([rows.ids for rows in parts])
    scores = np.concatenate([rows.scores for rows in parts])
    order = np.lexsort((-scores, ids, keys))  # the larger of two scores comes first
    order = order[_is_first(keys[order], ids[order])]
    found, where = np.unique(keys, return_inverse=True)
    youngest = np.full(len(found), len(keys), np.int64)
    np.minimum.at(youngest, where, ages)
    order = order[np.lexsort((ids[order], -scores[order], keys[order], -youngest[where[order]]))]
    starts = np.flatnonzero(_is_first(keys[order]))
    lengths = np.diff(np.append(starts, len(order)))
    kept = order[np.arange(len(order)) - np.repeat(starts, lengths) < entries]
    return Rows(keys[order][starts], np.minimum(lengths, entries), ids[kept], scores[kept])


def _is_first(*columns: np.ndarray) -> np.ndarray:
    """Whether a row of sorted columns differs from the previous row. bool [n]."""
    differs = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.concatenate([np.ones(min(1, len(columns[0])), bool), differs])


def check(arrays: dict[str, np.ndarray], entries: int) -> Rows:
    """The rows of a snapshot's arrays. Raises DataError if they are inconsistent."""
    try:
        rows = Rows(**arrays)
    except TypeError:
        raise DataError(
            f"expected the arrays {', '.join(Rows._fields)}, got {', '.join(arrays)}; use another "
            "file"
        ) from None
    rows = Rows(*(np.asarray(a, t) for a, t in zip(rows, ("u8", "i8", "i4", "f4"), strict=True)))
    is_consistent = (
        len(rows.keys) == len(rows.sizes) == len(np.unique(rows.keys))
        and len(rows.ids) == len(rows.scores) == rows.sizes.sum()
        and bool(((rows.sizes > 0) & (rows.sizes <= entries)).all())
        and bool((rows.keys != 0).all() and (rows.ids >= 0).all())
        and bool((np.isfinite(rows.scores) & (rows.scores > 0)).all())
    )
    if not is_consistent:
        raise DataError("the rows of the tri-gram matrix are inconsistent; build it again")
    return rows


@cache
def warm_up() -> None:
    """Compiles the kernels of the matrix, or loads them from the cache."""
    matrix = TrigramMatrix(entries=2)
    matrix.count([np.arange(4, dtype=np.int32)])
    matrix.nudge([1, 2, 3])
    matrix.row(1, 2)
    kernels.rehash(matrix.table, new_table(64, 2))
    kernels.evict(matrix.table, 0, 1)
