"""Suffix arrays of token texts: whole, in parts of bounded memory, and packed.

Suffixes are ordered by their token ids; the end of the text sorts below all ids. The separator is
the largest value of the token type, so it sorts above all ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from forerun.ngrams.index.build.page_sums import TABLE, TEXT, Pages, touch
from forerun.ngrams.index.build.sais import counter, sort_suffixes
from forerun.utils.jit import compiled, kernel

BUCKET_BITS = 20  # at most 2**BUCKET_BITS buckets of first tokens
MAX_COUNTERS = 1 << 24  # of the sorter; larger ids are renumbered first
TYPES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Shard(NamedTuple):
    """Arrays of one shard, in memory or mapped from disk."""

    text: np.ndarray  # [n] token ids, a separator before every document
    table: np.ndarray  # uint8 [n * width]: positions of the sorted suffixes, little-endian
    width: int  # bytes per position
    buckets: np.ndarray  # int64 [b + 1]: first rank per bucket of first tokens
    shift: int  # the bucket of an id is id >> shift, at most b - 1
    fences: np.ndarray  # uint64 [n / step]: first tokens of every step-th suffix; or empty
    step: int
    top: int  # largest id; a larger one is read as the text's end
    sums: np.ndarray  # page checksums; sums, seen, firsts: see `Pages`
    seen: np.ndarray
    firsts: np.ndarray

    @property
    def pages(self) -> Pages:
        """The page checksums."""
        return Pages(self.sums, self.seen, self.firsts)


def suffix_array(text: np.ndarray, top: int | None = None) -> np.ndarray:
    """Positions of the sorted suffixes of `text` (unsigned ids), int32 or int64 [n]; linear time.

    top: the largest id except the separator; None: computed.
    """
    out = np.empty(len(text), np.int32 if len(text) < 1 << 31 else np.int64)
    top = largest_id(text) if top is None else top
    if top + 2 > max(MAX_COUNTERS, 4 * len(text)):
        _, text = np.unique(text, return_inverse=True)
        text, top = text.astype(np.uint32), int(text.max(initial=0))
    sort_suffixes(text, out, top + 2)
    return out


def largest_id(text: np.ndarray) -> int:
    """The largest id except the separator; 0 if there is none."""
    ids = text[text != separator(text.dtype)]
    return int(ids.max(initial=0))


def separator(dtype: type[np.unsignedinteger[Any]] | np.dtype[Any]) -> int:
    """The value before every document: the largest of the token type."""
    return int(np.iinfo(dtype).max)


def sort_part(text: np.ndarray, start: int, stop: int, overlap: int, top: int) -> np.ndarray:
    """Sorted suffixes that begin in [start, stop), compared up to `overlap` tokens past `stop`."""
    part = np.array(text[start : min(len(text), stop + overlap)])  # a copy: sorting reads randomly
    order = suffix_array(part, top)
    return order if len(order) == stop - start else order[order < stop - start]


def part_bytes(width: int) -> int:
    """Bytes per token while sorting: result, text, and names and counters of the recursion."""
    return 4 + width + 5


def pointer_width(length: int) -> int:
    """Bytes per position in a text of this length."""
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


@kernel
def pointer(table: np.ndarray, width: int, rank: int) -> int:
    """The position at a rank."""
    at = rank * width
    found = 0
    for k in range(width - 1, -1, -1):
        found = (found << 8) | counter(table[at + k], 255)
    return found


@kernel
def position(shard: Shard, rank: int) -> int:
    """The position at a rank of a shard, verified and within the text."""
    first, last = rank * shard.width, (rank + 1) * shard.width - 1
    touch(shard.sums, shard.seen, shard.firsts, TABLE, shard.table, first)
    touch(shard.sums, shard.seen, shard.firsts, TABLE, shard.table, last)
    return max(0, min(pointer(shard.table, shard.width, rank), len(shard.text) - 1))


@kernel
def token_at(shard: Shard, at: int) -> int:
    """The token at a position of a shard, verified."""
    touch(shard.sums, shard.seen, shard.firsts, TEXT, shard.text, at)
    return np.int64(shard.text[at])  # type: ignore[return-value]


@compiled
def count_firsts(text: np.ndarray, shift: int, counts: np.ndarray) -> None:
    """Adds the number of tokens per bucket [b]."""
    last = len(counts) - 1
    for i in range(len(text)):
        counts[counter(text[i] >> shift, last)] += 1


def find_buckets(text: np.ndarray, top: int) -> tuple[np.ndarray, int]:
    """The first rank per bucket of first tokens [b + 1], and the shift.

    The last bucket is for the separator.
    """
    shift = max(0, int(top).bit_length() - BUCKET_BITS)
    counts = np.zeros((top >> shift) + 2, np.int64)
    for at in range(0, len(text), 1 << 24):
        count_firsts(np.asarray(text[at : at + (1 << 24)]), shift, counts)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]), shift
