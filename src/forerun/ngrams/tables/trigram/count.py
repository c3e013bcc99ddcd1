"""Exact tri-gram counts of a corpus, by sorting in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

CHUNK_TRIGRAMS = 1 << 21  # sorted at once


@dataclass(frozen=True)
class Run:
    """Distinct tri-grams, sorted by (a, b), then c."""

    pairs: np.ndarray  # uint64 [n], a << 32 | b
    thirds: np.ndarray  # int32 [n]
    counts: np.ndarray  # int64 [n]


@dataclass(frozen=True)
class CorpusCounts(Run):
    """All counts of a corpus, and the size of its documents."""

    num_documents: int = 0
    longest: int = 0  # tokens


@dataclass(frozen=True)
class Best:
    """The most likely successors per pair, concatenated, by falling P(c | a, b), ties by id."""

    pairs: np.ndarray  # uint64 [m]
    sizes: np.ndarray  # int64 [m], successors per pair
    ids: np.ndarray  # int32 [sum of sizes]
    probs: np.ndarray  # float32 [sum of sizes]
    dropped: int  # pairs beyond the limit


@dataclass
class _Sorter:
    """Merge sort of tri-grams: sorted runs of similar sizes are merged, O(n log n)."""

    runs: list[Run] = field(default_factory=list)
    pending: list[np.ndarray] = field(default_factory=list)
    size: int = 0

    def add(self, document: np.ndarray) -> None:
        self.pending.append(document)
        self.size += len(document) - 2
        if self.size >= CHUNK_TRIGRAMS:
            self.flush()

    def flush(self) -> None:
        if not self.pending:
            return
        pairs = np.concatenate([_pairs(d[:-1]) for d in self.pending])
        thirds = np.concatenate([d[2:] for d in self.pending])
        self.runs.append(_merged(pairs, thirds, np.ones(len(thirds), np.int64)))
        self.pending, self.size = [], 0
        while len(self.runs) > 1 and 2 * len(self.runs[-1].counts) >= len(self.runs[-2].counts):
            self.join()

    def join(self) -> None:
        a, b = self.runs.pop(), self.runs.pop()
        self.runs.append(
            _merged(
                np.concatenate([a.pairs, b.pairs]),
                np.concatenate([a.thirds, b.thirds]),
                np.concatenate([a.counts, b.counts]),
            )
        )


def count(documents: Iterable[np.ndarray]) -> CorpusCounts:
    """Counts of all tri-grams within documents of token ids, int32."""
    sorter = _Sorter()
    num_documents, longest = 0, 0
    for document in documents:
        num_documents += 1
        longest = max(longest, len(document))
        if len(document) > 2:
            sorter.add(document)
    sorter.flush()
    while len(sorter.runs) > 1:
        sorter.join()
    empty = Run(np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.int64))
    (run,) = sorter.runs or [empty]
    return CorpusCounts(run.pairs, run.thirds, run.counts, num_documents, longest)


def best(run: Run, entries: int, max_pairs: int) -> Best:
    """The `entries` most likely successors of the `max_pairs` most frequent pairs."""
    order = np.lexsort((run.thirds, -run.counts, run.pairs))
    pairs, thirds, counts = run.pairs[order], run.thirds[order], run.counts[order]
    starts = np.flatnonzero(np.concatenate([[True], pairs[1:] != pairs[:-1]]))
    totals = np.add.reduceat(counts, starts)
    lengths = np.diff(np.concatenate([starts, [len(pairs)]]))
    ranks = np.arange(len(pairs)) - np.repeat(starts, lengths)
    is_kept = np.ones(len(starts), bool)
    if len(starts) > max_pairs:
        is_kept[np.argsort(-totals, kind="stable")[max_pairs:]] = False
    chosen = (ranks < entries) & np.repeat(is_kept, lengths)
    probs = counts / np.repeat(totals, lengths)
    return Best(
        pairs[starts][is_kept],
        np.minimum(lengths, entries)[is_kept],
        thirds[chosen],
        probs[chosen].astype(np.float32),
        int((~is_kept).sum()),
    )


def _pairs(tokens: np.ndarray) -> np.ndarray:
    """a << 32 | b of consecutive tokens, uint64 [len - 1]."""
    wide = tokens.astype(np.uint64)
    return wide[:-1] << np.uint64(32) | wide[1:]


def _merged(pairs: np.ndarray, thirds: np.ndarray, counts: np.ndarray) -> Run:
    """A sorted run; counts of equal tri-grams are added."""
    order = np.lexsort((thirds, pairs))
    pairs, thirds, counts = pairs[order], thirds[order], counts[order]
    is_new = np.concatenate([[True], (pairs[1:] != pairs[:-1]) | (thirds[1:] != thirds[:-1])])
    starts = np.flatnonzero(is_new)
    return Run(pairs[starts], thirds[starts], np.add.reduceat(counts, starts))
