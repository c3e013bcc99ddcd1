"""Sparse index of a suffix array: the first tokens ("fence") of every `step`-th sorted suffix.

Each step of a binary search in the suffix array reads two places on disk: a position and the text
there. Fences are contiguous in rank order. A search among them leaves at most `step` ranks at
either end of the interval to look up. A fence has 64 bits: the first tokens of the suffix, the
first one highest, with zeros after the text's end.

Law: intervals are the same with and without fences (tests).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forerun.ngrams.index.build.page_sums import FENCES, touch
from forerun.ngrams.index.build.suffix_array import Shard, pointer
from forerun.utils.jit import kernel

STEP = 16  # ranks between fences: half a byte per token
FENCES_PER_PIECE = 1 << 20
NO_FENCES = np.empty(0, np.uint64)


def make_fences(text: np.ndarray, table: np.ndarray, width: int, step: int = STEP) -> np.ndarray:
    """The fences of a sorted text, uint64 [ceil(n / step)]; for `table`, `width` see `Shard`."""
    return np.concatenate([NO_FENCES, *fence_pieces(text, table, width, step)])


def fence_pieces(
    text: np.ndarray, table: np.ndarray, width: int, step: int = STEP
) -> Iterator[np.ndarray]:
    """The fences in pieces of bounded memory."""
    count = -(-len(text) // step)
    for first in range(0, count, FENCES_PER_PIECE):
        out = np.empty(min(FENCES_PER_PIECE, count - first), np.uint64)
        fill(text, table, width, step, first, out)
        yield out


@kernel
def fill(
    text: np.ndarray, table: np.ndarray, width: int, step: int, first: int, out: np.ndarray
) -> None:
    """Writes the fences from number `first` to `out`."""
    bits = 8 * text.itemsize
    for i in range(len(out)):
        at, key = pointer(table, width, (first + i) * step), np.uint64(0)
        for k in range(64 // bits):
            key <<= np.uint64(bits)
            if at + k < len(text):
                key |= np.uint64(text[at + k])
        out[i] = key


@kernel
def keys_of(query: np.ndarray, low: int, high: int, bits: int) -> tuple[np.uint64, np.uint64, int]:
    """The smallest and largest fence that begin with query[low:high], and their token count.

    Trailing tokens 0 are left out: in a fence they equal the text's end.
    """
    size = min(high - low, 64 // bits)
    for k in range(size):
        if query[low + k] < 0:
            size = k
            break
    while size and query[low + size - 1] == 0:
        size -= 1
    if size == 0:
        return np.uint64(0), ~np.uint64(0), 0
    least = np.uint64(0)
    for k in range(size):
        least |= np.uint64(query[low + k]) << np.uint64(64 - bits * (k + 1))
    rest = np.uint64(64 - bits * size)
    return least, least | ((np.uint64(1) << rest) - np.uint64(1)), size


@kernel
def first_fence(shard: Shard, key: np.uint64, is_above: bool, start: int, end: int) -> int:
    """The first fence in [start, end) >= `key`, or > `key` with `is_above`; `end` if none."""
    fences = shard.fences
    while start < end:
        middle = (start + end) // 2
        touch(shard.sums, shard.seen, shard.firsts, FENCES, fences, middle)
        if fences[middle] < key or (is_above and fences[middle] == key):
            start = middle + 1
        else:
            end = middle
    return start


@kernel
def narrow(
    shard: Shard, query: np.ndarray, low: int, high: int, left: int, right: int
) -> tuple[int, int, int, int]:
    """Bounds (a, b, c, d) of a query's interval within [left, right): begin in [a, b], end in
    [c, d]. For a query longer than a fence, b = d and c = a.
    """
    step = shard.step
    if len(shard.fences) == 0 or right - left <= step:
        return left, right, left, right
    least, most, size = keys_of(query, low, high, 8 * shard.text.itemsize)
    start, end = (left + step - 1) // step, (right + step - 1) // step
    first = first_fence(shard, least, False, start, end)
    last = first_fence(shard, most, True, first, end)
    a, d = max(left, (first - 1) * step + 1), min(right, last * step)
    if size < high - low:
        return a, d, a, d
    return a, min(right, first * step), max(left, (last - 1) * step + 1), d
