"""Merges the sorted parts of a shard into its suffix array, slice by slice (compiled).

Part i of a shard is the sorted list of suffixes that begin in its range of positions; it is stored
at the same range of ranks. A comparison reads at most `limit` tokens, because a part was sorted
with that overlap. Longer repeats are ordered by position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.ngrams.index.build.suffix_array import pointer
from forerun.utils.jit import compiled


class Merge(NamedTuple):
    """State of a k-way merge: a heap with the first unread suffix of every part."""

    cursors: np.ndarray  # int64 [k]: next rank to read per part
    stops: np.ndarray  # int64 [k]: end of the ranks per part
    keys: np.ndarray  # uint64 [k]: first tokens per heap entry
    heads: np.ndarray  # int64 [k]: position per heap entry
    parts: np.ndarray  # int64 [k]: part per heap entry
    size: np.ndarray  # int64 [1]: entries of the heap; -1: not filled


def begin(starts: np.ndarray, stops: np.ndarray) -> Merge:
    """A merge of the ranks [starts[i], stops[i]) of every part i."""
    k = len(starts)
    return Merge(
        starts.astype(np.int64),
        stops.astype(np.int64),
        np.zeros(k, np.uint64),
        np.zeros(k, np.int64),
        np.zeros(k, np.int64),
        np.array([-1], np.int64),
    )


@compiled
def first_tokens(text: np.ndarray, at: int) -> np.uint64:
    """The first eight bytes of a suffix as an order-preserving key; missing tokens are 0."""
    bits = 8 * text.itemsize
    key = np.uint64(0)
    for k in range(64 // bits):
        token = np.uint64(text[at + k]) if at + k < len(text) else np.uint64(0)
        key = (key << np.uint64(bits)) | token
    return key


@compiled
def is_before(text: np.ndarray, a: int, b: int, limit: int) -> bool:
    """Whether suffix a sorts before suffix b, by `limit` tokens and then by position."""
    n = len(text)
    for k in range(min(limit, n - max(a, b))):
        if text[a + k] != text[b + k]:
            return text[a + k] < text[b + k]
    if max(a, b) + limit >= n:  # the text's end sorts below all ids
        return a > b
    return a < b


@compiled
def is_above(text: np.ndarray, merge: Merge, i: int, j: int, limit: int) -> bool:
    """Whether heap entry i sorts before entry j."""
    if merge.keys[i] != merge.keys[j]:
        return merge.keys[i] < merge.keys[j]
    return is_before(text, merge.heads[i], merge.heads[j], limit)


@compiled
def swap(merge: Merge, i: int, j: int) -> None:
    """Swaps two heap entries."""
    merge.keys[i], merge.keys[j] = merge.keys[j], merge.keys[i]
    merge.heads[i], merge.heads[j] = merge.heads[j], merge.heads[i]
    merge.parts[i], merge.parts[j] = merge.parts[j], merge.parts[i]


@compiled
def sink(text: np.ndarray, merge: Merge, i: int, limit: int) -> None:
    """Moves an entry down to its place in the heap."""
    size = merge.size[0]
    while True:
        least = i
        for child in (2 * i + 1, 2 * i + 2):
            if child < size and is_above(text, merge, child, least, limit):
                least = child
        if least == i:
            return
        swap(merge, i, least)
        i = least


@compiled
def refill(text: np.ndarray, table: np.ndarray, width: int, merge: Merge, i: int) -> bool:
    """Replaces heap entry i by the next suffix of its part; False if there is none."""
    part = merge.parts[i]
    if merge.cursors[part] >= merge.stops[part]:
        return False
    merge.heads[i] = pointer(table, width, merge.cursors[part])
    merge.cursors[part] += 1
    merge.keys[i] = first_tokens(text, merge.heads[i])
    return True


@compiled
def fill_heap(text: np.ndarray, table: np.ndarray, width: int, merge: Merge, limit: int) -> None:
    """Fills the heap with the first suffix of every part."""
    size = 0
    for part in range(len(merge.cursors)):
        merge.parts[size] = part
        size += refill(text, table, width, merge, size)
    merge.size[0] = size
    for i in range(size // 2, -1, -1):
        sink(text, merge, i, limit)


@compiled
def advance(
    text: np.ndarray, table: np.ndarray, width: int, merge: Merge, limit: int, out: np.ndarray
) -> int:
    """Writes the next positions to `out`, packed; returns their number. 0: the merge is done."""
    if merge.size[0] < 0:
        fill_heap(text, table, width, merge, limit)
    done, room = 0, len(out) // width
    while done < room and merge.size[0] > 0:
        head = merge.heads[0]
        for k in range(width):
            out[done * width + k] = (head >> (8 * k)) & 255
        done += 1
        if not refill(text, table, width, merge, 0):
            merge.size[0] -= 1
            swap(merge, 0, merge.size[0])
        sink(text, merge, 0, limit)
    return done


@compiled
def rank_in_part(
    text: np.ndarray, table: np.ndarray, width: int, low: int, high: int, at: int, limit: int
) -> int:
    """The first rank in [low, high) with a suffix not before the suffix at `at`."""
    while low < high:
        middle = (low + high) // 2
        if is_before(text, pointer(table, width, middle), at, limit):
            low = middle + 1
        else:
            high = middle
    return low


def cut(
    text: np.ndarray, table: np.ndarray, width: int, borders: np.ndarray, slices: int, limit: int
) -> np.ndarray:
    """Ranks [slices + 1, k] that cut all parts at evenly spaced suffixes of the longest part.

    borders: int64 [k + 1], begins and ends of parts.
    """
    longest = int(np.argmax(np.diff(borders)))
    cuts = np.empty((slices + 1, len(borders) - 1), np.int64)
    cuts[0], cuts[-1] = borders[:-1], borders[1:]
    for i, rank in enumerate(
        np.linspace(borders[longest], borders[longest + 1], slices + 1).astype(np.int64)[1:-1], 1
    ):
        at = pointer(table, width, int(rank))
        for part, (low, high) in enumerate(zip(borders[:-1], borders[1:], strict=True)):
            cuts[i, part] = rank_in_part(text, table, width, int(low), int(high), at, limit)
    return np.maximum.accumulate(cuts)  # repeats beyond the limit may be out of order
