"""Fences: the first tokens of every `step`-th sorted suffix, so that a search begins near its end.

A binary search reads a position and then the text there, in two places of the disk, at each of its
steps. Fences lie side by side in the order of ranks: a search among them leaves `step` ranks on
either edge, and only these are looked up. A fence is 64 bits, as many tokens as go into them, the
first one highest; zeros stand behind the text's end.

Law: with fences or without them, all intervals are the same (tests).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forerun.ngrams.index.build.suffix_array import Shard, pointer
from forerun.utils.jit import bare

STEP = 16  # ranks between fences: half a byte per token
AT_ONCE = 1 << 20  # fences per piece
NONE = np.empty(0, np.uint64)


def make_fences(text: np.ndarray, table: np.ndarray, width: int, step: int = STEP) -> np.ndarray:
    """The fences of a sorted text, uint64 [ceil(n / step)]; for `table`, `width` see `Shard`."""
    return np.concatenate([NONE, *fence_pieces(text, table, width, step)])


def fence_pieces(
    text: np.ndarray, table: np.ndarray, width: int, step: int = STEP
) -> Iterator[np.ndarray]:
    """The same in pieces, for what does not fit into memory."""
    count = -(-len(text) // step)
    for first in range(0, count, AT_ONCE):
        out = np.empty(min(AT_ONCE, count - first), np.uint64)
        fill(text, table, width, step, first, out)
        yield out


@bare
def fill(
    text: np.ndarray, table: np.ndarray, width: int, step: int, first: int, out: np.ndarray
) -> None:
    """Writes fences from number `first` on."""
    bits = 8 * text.itemsize
    for i in range(len(out)):
        at, key = pointer(table, width, (first + i) * step), np.uint64(0)
        for k in range(64 // bits):
            key <<= np.uint64(bits)
            if at + k < len(text):
                key |= np.uint64(text[at + k])
        out[i] = key


@bare
def keys_of(query: np.ndarray, low: int, high: int, bits: int) -> tuple[np.uint64, np.uint64, int]:
    """The least and the largest fence that begin with query[low:high], and the tokens they hold.

    Tokens at the end that are 0 are left out: in a fence they look like the text's end.
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


@bare
def first_fence(fences: np.ndarray, key: np.uint64, is_above: bool, start: int, end: int) -> int:
    """The first in [start, end) that is at least `key`, or with `is_above` more; `end` if none."""
    while start < end:
        middle = (start + end) // 2
        if fences[middle] < key or (is_above and fences[middle] == key):
            start = middle + 1
        else:
            end = middle
    return start


@bare
def narrow(
    shard: Shard, query: np.ndarray, low: int, high: int, left: int, right: int
) -> tuple[int, int, int, int]:
    """Where the edges of an interval within [left, right) are: the first in [a, b], its end in
    [c, d]. Of a query that a fence does not hold whole both are in [a, d], and b = d, c = a.
    """
    step = shard.step
    if len(shard.fences) == 0 or right - left <= step:
        return left, right, left, right
    least, most, size = keys_of(query, low, high, 8 * shard.text.itemsize)
    start, end = (left + step - 1) // step, (right + step - 1) // step
    first = first_fence(shard.fences, least, False, start, end)
    last = first_fence(shard.fences, most, True, first, end)
    a, d = max(left, (first - 1) * step + 1), min(right, last * step)
    if size < high - low:
        return a, d, a, d
    return a, min(right, first * step), max(left, (last - 1) * step + 1), d
