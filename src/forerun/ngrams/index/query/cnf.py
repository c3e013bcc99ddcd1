"""AND of ORs over an index: places where every clause occurs, not far from each other.

What is counted are ranges of positions, not documents. Each occurrence of the rarest clause in a
shard starts one, and one may become two where the next clause lies on both sides of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from forerun.errors import ConfigError
from forerun.ngrams.index.build.sais import counter
from forerun.ngrams.index.build.suffix_array import Shard, unpack

if TYPE_CHECKING:
    from forerun.ngrams.index.query.engine import Ids, Index

MAX_CLAUSE_FREQ, MAX_DIFF_TOKENS = 50_000, 100


@dataclass(frozen=True)
class Ranges:
    """Ranges that hold every clause: from the first match's start to the last match's."""

    count: float  # ranges, scaled up for what was left out
    ranges: list[np.ndarray]  # int64 [m, 2] of every shard
    is_approximate: bool


def find(
    index: Index,
    cnf: Many[Many[Ids]],
    *,
    max_clause_freq: int = MAX_CLAUSE_FREQ,
    max_diff_tokens: int = MAX_DIFF_TOKENS,
    seed: int = 0,
) -> Ranges:
    """Ranges of at most `max_diff_tokens` that hold every clause and no end of a document.

    Of a clause with more than `max_clause_freq` matches, a random share is looked at. Raises
    ConfigError for an empty clause or term.
    """
    check(cnf, max_clause_freq, max_diff_tokens)
    rng = np.random.default_rng(seed)
    factor = 1.0
    per_clause = []
    for clause in cnf:
        positions, share = matches(index, clause, max_clause_freq, rng)
        factor *= share
        per_clause.append(positions)
    found = [
        join(shard, [positions[s] for positions in per_clause], max_diff_tokens, index.separator)
        for s, shard in enumerate(index.shards)
    ]
    return Ranges(sum(map(len, found)) * factor, found, factor != 1.0)


def check(cnf: Many[Many[Ids]], max_clause_freq: int, max_diff_tokens: int) -> None:
    """Raises ConfigError for what cannot be asked."""
    if not len(cnf) or any(not len(clause) for clause in cnf):
        raise ConfigError("expected clauses of at least one term each, got an empty one")
    if any(not len(term) for clause in cnf for term in clause):
        raise ConfigError("an empty term is everywhere; give at least one token per term")
    if max_clause_freq < 1 or max_diff_tokens < 0:
        raise ConfigError(
            "max_clause_freq must be at least 1 and max_diff_tokens at least 0, got "
            f"{max_clause_freq} and {max_diff_tokens}"
        )


def matches(
    index: Index, clause: Many[Ids], most: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], float]:
    """Sorted positions of any term in every shard, and by how much to scale their number up.

    Too many are thinned in proportion: of every interval a random run of ranks is kept.
    """
    found = [index.find(term) for term in clause]
    total = sum(match.count for match in found)
    kept = total
    if total > most:
        kept, thinned = 0, []
        for match in found:
            runs = [_run(left, right, most / total, rng) for left, right in match.intervals]
            thinned.append(runs)
            kept += sum(right - left for left, right in runs)
    else:
        thinned = [match.intervals for match in found]
    positions = []
    for s, shard in enumerate(index.shards):
        parts = [_positions(shard, *runs[s]) for runs in thinned]
        positions.append(np.unique(np.concatenate(parts)))
    return positions, total / kept if kept else 1.0


def _run(left: int, right: int, share: float, rng: np.random.Generator) -> tuple[int, int]:
    """A random run of about that share of an interval, at least one of what is there."""
    size = min(right - left, max(1, round((right - left) * share)))
    start = left + int(rng.integers(right - left - size + 1))
    return start, start + size


def _positions(shard: Shard, left: int, right: int) -> np.ndarray:
    return unpack(shard.table[left * shard.width : right * shard.width], shard.width)


def join(shard: Shard, clauses: list[np.ndarray], most: int, separator: int) -> np.ndarray:
    """Ranges of one shard that hold a position of every clause. int64 [m, 2]."""
    order = sorted(clauses, key=len)
    ranges = np.repeat(order[0][:, None], 2, axis=1)
    for positions in order[1:]:
        ranges = extend(shard.text, ranges, positions, most, separator)
    return drop_broken(shard.text, ranges, separator)


@njit(cache=True, nogil=True)
def extend(
    text: np.ndarray, ranges: np.ndarray, positions: np.ndarray, most: int, separator: int
) -> np.ndarray:
    """Every range grown to hold one of the sorted positions, no longer than `most` afterwards.

    A range that holds one stays. Else the nearest of the same document on both sides are taken:
    both, if the range is then short enough, or else each that fits by itself.
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
            and is_whole(text, positions[after - 1], low, separator)
        )
        has_right = (
            after < len(positions)
            and positions[after] - low <= most
            and is_whole(text, high, positions[after], separator)
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


@njit(cache=True, nogil=True)
def is_whole(text: np.ndarray, first: int, last: int, separator: int) -> bool:
    """Whether no document ends from the one position to the other."""
    while first <= last and counter(text[first], separator) != separator:
        first += 1
    return first > last


@njit(cache=True, nogil=True)
def drop_broken(text: np.ndarray, ranges: np.ndarray, separator: int) -> np.ndarray:
    """The ranges in which no document ends."""
    keep = np.ones(len(ranges), np.bool_)
    for i in range(len(ranges)):
        keep[i] = is_whole(text, ranges[i, 0], ranges[i, 1], separator)
    return ranges[keep]
