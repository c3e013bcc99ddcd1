"""A pass over few rows as one array of numbers, of a size that only its shape decides.

A graph reads where rows belong and what they see from this array, so the same graph serves every
pass of its shape: texts of any length, trees of any form.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from forerun.runner.forward_batch import FIELDS, Packed

if TYPE_CHECKING:
    from forerun.runner.forward_batch import Work

HEAD = 2  # numbers of rows and of tiles
PER_ROW = 4  # id, position, cell, wanted row
TILE = 5  # first row, rows, where the slot starts, base, stop
WORDS, BITS = 4, 64  # of each row: which cells after the base it sees
MOST_ROWS, MOST_OWN = 128, WORDS * BITS  # rows of a pass; cells after a base
TOGETHER = 16  # rows of one sequence that a tile has at most


class Shape(NamedTuple):
    """What a graph is made for: so many rows and tiles at most, so many rows per tile."""

    rows: int
    tiles: int
    together: int

    @property
    def size(self) -> int:
        """Numbers of the array: HEAD, PER_ROW fields of all rows, WORDS of each, TILE of each."""
        return HEAD + (PER_ROW + WORDS) * self.rows + TILE * self.tiles


def fits(works: Many[Work]) -> bool:
    """Whether some shape has room for these."""
    rows = sum(work.num_rows for work in works)
    own = max(len(work.pending) + len(work.parents) for work in works)
    return rows <= MOST_ROWS and own <= MOST_OWN


def shape_of(works: Many[Work]) -> Shape:
    """The shape that has room for them: powers of two, so that few shapes serve all passes."""
    counts = [work.num_rows for work in works]
    rows = power_of_two(sum(counts))
    if max(counts) == 1:
        return Shape(rows, rows, 1)
    return Shape(rows, power_of_two(sum(-(-num // TOGETHER) for num in counts)), TOGETHER)


def power_of_two(least: int) -> int:
    """The smallest one that is not below `least`."""
    return 1 << (least - 1).bit_length()


def describe(shape: Shape, packed: Packed, num_rows: int, slot_stride: int) -> np.ndarray:
    """The array of a pass, int64 [shape.size]."""
    out = np.zeros(shape.size, np.int64)
    fill(out, *shape, packed.numbers, packed.sees, num_rows, slot_stride)
    return out


@njit(cache=True, nogil=True)
def fill(
    out: np.ndarray,
    most_rows: int,
    most_tiles: int,
    together: int,
    numbers: np.ndarray,
    sees: np.ndarray,
    num_rows: int,
    slot_stride: int,
) -> None:
    """Fills zeros from what `engine.work.pack` has made of the works."""
    for field in range(PER_ROW):
        at = HEAD + field * most_rows
        out[at : at + num_rows] = numbers[field * num_rows : (field + 1) * num_rows]
    bits = out[HEAD + PER_ROW * most_rows :]
    tiles = out[HEAD + (PER_ROW + WORDS) * most_rows :]
    spans = numbers[PER_ROW * num_rows :].reshape((-1, FIELDS))
    tile = seen = 0
    for slot, base, stop, rows, first, address in spans:
        own = stop - base
        for i in range(rows):
            for cell in range(own):
                is_seen = cell <= own - rows + i
                if address:
                    is_seen = sees[seen + (own - rows + i) * own + cell]
                if is_seen:
                    bits[(first + i) * WORDS + cell // BITS] |= np.int64(1) << (cell % BITS)
        seen += own * own if address else 0
        for start in range(0, rows, together):
            at = tile * TILE
            tiles[at], tiles[at + 1] = first + start, min(together, rows - start)
            tiles[at + 2], tiles[at + 3], tiles[at + 4] = slot * slot_stride, base, stop
            tile += 1
    out[0], out[1] = num_rows, tile
