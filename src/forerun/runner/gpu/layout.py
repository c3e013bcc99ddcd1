"""Describes a pass over few rows as one array; its size depends only on the shape.

A graph reads positions and visibility of rows from this array, so one graph serves every pass of
its shape: texts of any length, trees of any form.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forerun.runner.forward_batch import FIELDS, Packed
from forerun.utils.jit import compiled

if TYPE_CHECKING:
    from forerun.runner.forward_batch import Work

HEAD = 2  # number of rows, number of tiles
PER_ROW = 4  # id, position, cell, wanted row
TILE = 5  # first row, rows, start of the slot, base, stop
WORDS, BITS = 4, 64  # per row: mask of visible cells after the base
MAX_ROWS, MAX_OWN_CELLS = 128, WORDS * BITS  # rows of a pass; cells after a base
MAX_TILE_ROWS = 16  # most rows of a tile


class Shape(NamedTuple):
    """Capacity of a graph: rows, tiles, and rows per tile."""

    rows: int
    tiles: int
    together: int

    @property
    def size(self) -> int:
        """Length of the array: HEAD, then per row PER_ROW and WORDS, then per tile TILE."""
        return HEAD + (PER_ROW + WORDS) * self.rows + TILE * self.tiles


def fits(works: Many[Work]) -> bool:
    """Whether a shape exists for these."""
    rows = sum(work.num_rows for work in works)
    own = max(len(work.pending) + len(work.parents) for work in works)
    return rows <= MAX_ROWS and own <= MAX_OWN_CELLS


def shape_of(works: Many[Work]) -> Shape:
    """The smallest shape for them; sizes are powers of two, so that there are few shapes."""
    counts = [work.num_rows for work in works]
    rows = power_of_two(sum(counts))
    if max(counts) == 1:
        return Shape(rows, rows, 1)
    return Shape(rows, power_of_two(sum(-(-num // MAX_TILE_ROWS) for num in counts)), MAX_TILE_ROWS)


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def describe(shape: Shape, packed: Packed, num_rows: int, slot_stride: int) -> np.ndarray:
    """The array of a pass, int64 [shape.size]."""
    out = np.zeros(shape.size, np.int64)
    fill(out, *shape, packed.numbers, packed.sees, num_rows, slot_stride)
    return out


@compiled
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
    """Fills the array of zeros from the packed works (`forward_batch.pack`)."""
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
