"""Checksums of pages: a query verifies each page of an index file when it first reads it.

A page is 4 KiB of one file. Its checksum is the sum of its 32-bit words (of smaller elements, of
the elements) times fixed odd 64-bit weights, modulo 2**64. It detects damage, not forgery. A page
that does not match sets the last entry of `seen`; the caller of the kernel then raises DataError.

Law: with checksums, an answer is either the one of the undamaged files or an error (tests).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forerun.errors import DataError
from forerun.utils.jit import compiled, kernel

PAGE_SHIFT = 12  # log2 of the bytes of a page
PAGE_BYTES = 1 << PAGE_SHIFT
FILES = ("tokens", "suffixes", "buckets", "fences", "documents", "lines", "metadata")
TEXT, TABLE, BUCKETS, FENCES, DOCUMENTS, LINES, METADATA = range(len(FILES))  # index into FILES
RIGHT, WRONG = 1, 2  # in `seen`; 0: not read yet
LOW_WORD = np.uint64(0xFFFFFFFF)
STEP, MIX_A, MIX_B = (  # of the generator splitmix64
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


class Pages(NamedTuple):
    """The page checksums of one shard, with a mark for each page that was read."""

    sums: np.ndarray  # uint64 [pages]; empty: nothing is verified
    seen: np.ndarray  # uint8 [pages + 1]: 0, RIGHT or WRONG; the last is 1 after a wrong page
    firsts: np.ndarray  # int64 [len(FILES)]: the first page of each file


def no_pages() -> Pages:
    """Pages without checksums."""
    return Pages(np.empty(0, np.uint64), np.zeros(1, np.uint8), np.zeros(len(FILES), np.int64))


def num_pages(size: int) -> int:
    """Pages of a file of `size` bytes."""
    return -(-size // PAGE_BYTES)


def pages_of(sums: np.ndarray, sizes: list[int]) -> Pages:
    """Pages from the checksums of files with these sizes, in the order of FILES."""
    counts = [num_pages(size) for size in sizes]
    if sum(counts) != len(sums):
        raise DataError(
            f"expected {sum(counts)} page checksums, got {len(sums)}; restore the index from a "
            "copy, or build it again"
        )
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    return Pages(sums, np.zeros(len(sums) + 1, np.uint8), firsts)


def sums_of(files: list[tuple[Path, type]]) -> np.ndarray:
    """The page checksums of files, each with its element type, one after the other."""
    parts = [np.empty(0, np.uint64)]
    for file, dtype in files:
        size = file.stat().st_size
        out = np.empty(num_pages(size), np.uint64)
        if size:
            sum_pages(np.asarray(np.memmap(file, dtype, "r")), out)
        parts.append(out)
    return np.concatenate(parts)


def wrong_pages(pages: Pages) -> Iterator[tuple[str, int]]:
    """File kind and page number, from 0, of each page that did not match."""
    for page in np.flatnonzero(pages.seen[:-1] == WRONG).tolist():
        part = int(np.searchsorted(pages.firsts, page, side="right")) - 1
        yield FILES[part], page - int(pages.firsts[part])


@kernel
def weight(i: int) -> np.uint64:
    """The weight of word i of a page: the output i of splitmix64, made odd."""
    z = (np.uint64(i) + np.uint64(1)) * STEP
    z = (z ^ (z >> np.uint64(30))) * MIX_A
    z = (z ^ (z >> np.uint64(27))) * MIX_B
    return z ^ (z >> np.uint64(31)) | np.uint64(1)


@kernel
def page_sum(data: np.ndarray, page: int) -> np.uint64:
    """The checksum of a page of a file; the last page may be short."""
    size = PAGE_BYTES // data.itemsize
    start, total = page * size, np.uint64(0)
    for i in range(min(size, len(data) - start)):
        word = np.uint64(data[start + i])
        if data.itemsize == 8:
            total += (word & LOW_WORD) * weight(2 * i)
            total += (word >> np.uint64(32)) * weight(2 * i + 1)
        else:
            total += word * weight(i)
    return total


@compiled
def sum_pages(data: np.ndarray, out: np.ndarray) -> None:
    """Writes the checksum of every page of a file."""
    for page in range(len(out)):
        out[page] = page_sum(data, page)


@kernel
def verify(sums: np.ndarray, seen: np.ndarray, first: int, data: np.ndarray, page: int) -> None:
    """Compares a page of a file with its checksum; `first`: the file's first page."""
    if page_sum(data, page) == sums[first + page]:
        seen[first + page] = RIGHT
    else:
        seen[first + page] = WRONG
        seen[len(sums)] = 1


@kernel
def touch(
    sums: np.ndarray, seen: np.ndarray, firsts: np.ndarray, part: int, data: np.ndarray, i: int
) -> None:
    """Verifies the page of data[i], of file FILES[part], unless it was read before."""
    if len(sums) == 0:
        return
    page = (i * data.itemsize) >> PAGE_SHIFT
    if seen[firsts[part] + page] == 0:
        verify(sums, seen, firsts[part], data, page)


@compiled
def touch_range(
    sums: np.ndarray,
    seen: np.ndarray,
    firsts: np.ndarray,
    part: int,
    data: np.ndarray,
    start: int,
    stop: int,
) -> None:
    """Verifies the pages of data[start:stop]."""
    size = PAGE_BYTES // data.itemsize
    i = start
    while i < stop:
        touch(sums, seen, firsts, part, data, i)
        i = (i // size + 1) * size
