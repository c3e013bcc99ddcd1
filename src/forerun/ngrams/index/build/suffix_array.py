"""Suffix arrays of token texts: whole, by parts of bounded memory, packed into few bytes.

Suffixes are ordered token by token, by id; the end of the text is below all ids. The separator of
an index is the largest value of its token type, so it is above all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from forerun.ngrams.index.build.sais import counter, sort_suffixes
from forerun.utils.jit import bare

BUCKET_BITS = 20  # at most so many bits of a first token choose its bucket
MOST_COUNTERS = 1 << 24  # a sorter's counters; a text of rarer ids is numbered anew first
TYPES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Shard(NamedTuple):
    """What queries read: arrays that may lie on disk."""

    text: np.ndarray  # [n] token ids, a separator before every document
    table: np.ndarray  # uint8 [n * width]: positions of the sorted suffixes, little-endian
    width: int  # bytes per position
    buckets: np.ndarray  # int64 [b + 1]: where suffixes with a first token of each bucket start
    shift: int  # the bucket of an id is id >> shift, at most b - 1
    fences: np.ndarray  # uint64 [n / step]: first tokens of every step-th suffix; or empty
    step: int


def suffix_array(text: np.ndarray, top: int | None = None) -> np.ndarray:
    """Positions of the sorted suffixes of `text` (unsigned ids), int32 or int64 [n].

    `top`: the largest id apart from the separator, found if not given. Linear time.
    """
    out = np.empty(len(text), np.int32 if len(text) < 1 << 31 else np.int64)
    top = largest_id(text) if top is None else top
    if top + 2 > max(MOST_COUNTERS, 4 * len(text)):
        _, text = np.unique(text, return_inverse=True)
        text, top = text.astype(np.uint32), int(text.max(initial=0))
    sort_suffixes(text, out, top + 2)
    return out


def largest_id(text: np.ndarray) -> int:
    """The largest id that is no separator; 0 if there is none."""
    ids = text[text != separator(text.dtype)]
    return int(ids.max(initial=0))


def separator(dtype: type[np.unsignedinteger[Any]] | np.dtype[Any]) -> int:
    """The value that stands before every document: all bits are one."""
    return int(np.iinfo(dtype).max)


def sort_part(text: np.ndarray, start: int, stop: int, overlap: int, top: int) -> np.ndarray:
    """Sorted suffixes that begin in [start, stop), compared up to `overlap` tokens past `stop`."""
    part = np.array(text[start : min(len(text), stop + overlap)])  # in memory: read at random
    order = suffix_array(part, top)
    return order if len(order) == stop - start else order[order < stop - start]


def part_bytes(width: int) -> int:
    """Memory per token that sorting takes: result, text, and names and counters of a recursion."""
    return 4 + width + 5


def pointer_width(length: int) -> int:
    """Bytes that hold every position of a text of that length."""
    return max(1, (max(0, length - 1).bit_length() + 7) // 8)


def pack(positions: np.ndarray, width: int) -> np.ndarray:
    """Positions [n] as little-endian bytes, uint8 [n * width]."""
    wide = positions.astype("<u8").view(np.uint8).reshape(-1, 8)
    return np.ascontiguousarray(wide[:, :width]).reshape(-1)


def unpack(table: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `pack`: int64 [n]."""
    rows = np.asarray(table).reshape(-1, width)
    wide = np.zeros((len(rows), 8), np.uint8)
    wide[:, :width] = rows
    return wide.reshape(-1).view("<i8")


@bare
def pointer(table: np.ndarray, width: int, rank: int) -> int:
    """The position that stands at a rank."""
    at = rank * width
    found = 0
    for k in range(width - 1, -1, -1):
        found = (found << 8) | counter(table[at + k], 255)
    return found


@njit(cache=True, nogil=True)
def count_firsts(text: np.ndarray, shift: int, counts: np.ndarray) -> None:
    """Adds how many tokens fall into each bucket [b]."""
    last = len(counts) - 1
    for i in range(len(text)):
        counts[counter(text[i] >> shift, last)] += 1


def find_buckets(text: np.ndarray, top: int) -> tuple[np.ndarray, int]:
    """Where the sorted suffixes of each bucket of first tokens start [b + 1], and the shift.

    The last bucket is the separator's.
    """
    shift = max(0, int(top).bit_length() - BUCKET_BITS)
    counts = np.zeros((top >> shift) + 2, np.int64)
    for at in range(0, len(text), 1 << 24):
        count_firsts(np.asarray(text[at : at + (1 << 24)]), shift, counts)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]), shift
