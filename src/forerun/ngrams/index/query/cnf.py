"""CNF queries (AND of ORs): ranges of an index in which every clause occurs.

Ranges of positions are counted, not documents. Each occurrence of the rarest clause in a shard
starts a range. A range is split in two if the next clause occurs on both sides of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forerun.errors import ConfigError
from forerun.ngrams.index.build.page_sums import TABLE
from forerun.ngrams.index.build.suffix_array import Shard, token_at, unpack
from forerun.ngrams.index.query.documents import damaged
from forerun.utils.jit import compiled
from forerun.utils.numbers import whole

if TYPE_CHECKING:
    from forerun.ngrams.index.query.engine import Ids, Index

MAX_CLAUSE_FREQ, MAX_DIFF_TOKENS = 50_000, 100


@dataclass(frozen=True)
class Ranges:
    """Ranges with a match of every clause: from the first match's start to the last match's."""

    count: float  # number of ranges, scaled up if matches were sampled
    ranges: list[np.ndarray]  # int64 [m, 2] per shard
    is_approximate: bool


def find(
    index: Index,
    cnf: Many[Many[Ids]],
    *,
    max_clause_freq: int = MAX_CLAUSE_FREQ,
    max_diff_tokens: int = MAX_DIFF_TOKENS,
    seed: int = 0,
) -> Ranges:
    """Ranges within a document of at most `max_diff_tokens`, with a match of every clause.

    A clause with more than `max_clause_freq` matches is sampled. Raises ConfigError for an empty
    clause or term.
    """
    check(cnf, max_clause_freq, max_diff_tokens)
    rng = np.random.default_rng(whole("seed", seed, 0))
    factor = 1.0
    per_clause = []
    for clause in cnf:
        positions, share = matches(index, clause, max_clause_freq, rng)
        factor *= share
        per_clause.append(positions)
    found = [
        join(index, s, [positions[s] for positions in per_clause], max_diff_tokens)
        for s in range(len(index.shards))
    ]
    index.check_reads()
    return Ranges(sum(map(len, found)) * factor, found, factor != 1.0)


def check(cnf: Many[Many[Ids]], max_clause_freq: int, max_diff_tokens: int) -> None:
    """Raises ConfigError for an invalid query."""
    if not len(cnf) or any(not len(clause) for clause in cnf):
        raise ConfigError("expected clauses of at least one term each, got an empty clause")
    if any(not len(term) for clause in cnf for term in clause):
        raise ConfigError("an empty term matches everywhere; use at least one token per term")
    whole("max_clause_freq", max_clause_freq)
    whole("max_diff_tokens", max_diff_tokens, 0)


def matches(
    index: Index, clause: Many[Ids], most: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], float]:
    """Sorted positions of any term per shard, and the factor to scale their number up.

    Above `most` matches, a random run of ranks is sampled from every interval.
    """
    found = [index.find(term) for term in clause]
    total = sum(match.count for match in found)
    kept = total
    if total > most:
        kept, sampled = 0, []
        for match in found:
            runs = [_run(left, right, most / total, rng) for left, right in match.intervals]
            sampled.append(runs)
            kept += sum(right - left for left, right in runs)
    else:
        sampled = [match.intervals for match in found]
    positions = []
    for s in range(len(index.shards)):
        parts = [_positions(index, s, *runs[s]) for runs in sampled]
        positions.append(np.unique(np.concatenate(parts)))
    return positions, total / kept if kept else 1.0


def _run(left: int, right: int, share: float, rng: np.random.Generator) -> tuple[int, int]:
    """A random run of about `share` of an interval, at least one rank if it is not empty."""
    size = min(right - left, max(1, round((right - left) * share)))
    start = left + int(rng.integers(right - left - size + 1))
    return start, start + size


def _positions(index: Index, number: int, left: int, right: int) -> np.ndarray:
    """The positions at ranks [left, right) of a shard. Raises DataError for damage."""
    shard = index.shards[number]
    low, high = left * shard.width, right * shard.width
    index.verify(number, TABLE, shard.table, low, high)
    found = unpack(shard.table[low:high], shard.width)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < len(shard.text):
        raise damaged(f"suffixes of shard {number}", "a position is not in the text")
    return found


def join(index: Index, number: int, clauses: list[np.ndarray], most: int) -> np.ndarray:
    """Ranges of one shard with a position of every clause. int64 [m, 2]."""
    shard, separator = index.shards[number], index.separator
    order = sorted(clauses, key=len)
    ranges = np.repeat(order[0][:, None], 2, axis=1)
    for positions in order[1:]:
        ranges = extend(shard, ranges, positions, most, separator)
    return drop_broken(shard, ranges, separator)


@compiled
def extend(
    shard: Shard, ranges: np.ndarray, positions: np.ndarray, most: int, separator: int
) -> np.ndarray:
    """Extends every range to contain one of the sorted positions, up to a length of `most`.

    A range that contains one is unchanged. Otherwise it is extended to the nearest positions in the
    same document: to both if the result is short enough, else to each one that fits alone.
    """
    out = np.empty((2 * len(ranges), 2), np.int64)
    size = 0
    for i in range(len(ranges)):
        low, high = ranges[i, 0], ranges[i, 1]
        after = np.searchsorted(positions, low)
        if after < len(positions) and positions[after] <= high:
            out[size, 0], out[size, 1] = low, high
            size += 1
            continue
        has_left = (
            after > 0
            and high - positions[after - 1] <= most
            and is_whole(shard, positions[after - 1], low, separator)
        )
        has_right = (
            after < len(positions)
            and positions[after] - low <= most
            and is_whole(shard, high, positions[after], separator)
        )
        if has_left and has_right and positions[after] - positions[after - 1] <= most:
            out[size, 0], out[size, 1] = positions[after - 1], positions[after]
            size += 1
            continue
        if has_left:
            out[size, 0], out[size, 1] = positions[after - 1], high
            size += 1
        if has_right:
            out[size, 0], out[size, 1] = low, positions[after]
            size += 1
    return out[:size].copy()


@compiled
def is_whole(shard: Shard, first: int, last: int, separator: int) -> bool:
    """Whether no document ends between two positions."""
    while first <= last and token_at(shard, first) != separator:
        first += 1
    return first > last


@compiled
def drop_broken(shard: Shard, ranges: np.ndarray, separator: int) -> np.ndarray:
    """The ranges without the end of a document."""
    keep = np.ones(len(ranges), np.bool_)
    for i in range(len(ranges)):
        keep[i] = is_whole(shard, ranges[i, 0], ranges[i, 1], separator)
    return ranges[keep]
