"""Results of index queries, and their sum over shards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.utils.numbers import whole

Counted = tuple[np.ndarray, np.ndarray]  # ids, counts


@dataclass(frozen=True, slots=True)
class Match:
    """Occurrences of a query: their number, and ranks [left, right) per shard."""

    count: int
    intervals: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Prob:
    """An n-gram probability; None if the context does not occur."""

    prob: float | None
    count: int  # of context and token
    context_count: int
    suffix_length: int  # tokens of the context used


@dataclass(frozen=True, slots=True)
class Next:
    """Next tokens of a context: ids ascending, with counts."""

    ids: np.ndarray  # int64 [k]
    counts: np.ndarray  # int64 [k]
    context_count: int  # sum of the counts
    suffix_length: int
    is_approximate: bool

    @property
    def probs(self) -> np.ndarray:
        """P(id | context), float64 [k]."""
        return self.counts / max(1, self.context_count)

    @property
    def is_sparse(self) -> bool:
        """Whether one token has all the probability."""
        return len(self.ids) == 1


def add_up(
    eos: int, separator: int, parts: list[Counted], total: int, length: int, is_near: bool
) -> Next:
    """The sum of next tokens over shards; END and separator become eos."""
    if len(parts) == 1:
        ids, counts = parts[0]
    else:
        empty = np.empty(0, np.int64)
        ids = np.concatenate([empty, *(part[0] for part in parts)])
        counts = np.concatenate([empty, *(part[1] for part in parts)])
    if len(parts) > 1 or (len(ids) and (ids[0] < 0 or ids[-1] == separator)):
        ids = np.where((ids < 0) | (ids == separator), eos, ids)
        ids, where = np.unique(ids, return_inverse=True)
        summed = np.zeros(len(ids), np.int64)
        np.add.at(summed, where, counts)
        counts = summed
    return Next(ids, counts, total, length, is_near)


def unit_for(count: int, max_support: int | None) -> int:
    """The smallest power of two `unit` with count <= unit * max_support."""
    if max_support is None:
        return 1
    max_support = whole("max_support (None: exact counts)", max_support)
    return 1 << max(0, -(-count // max_support) - 1).bit_length()
