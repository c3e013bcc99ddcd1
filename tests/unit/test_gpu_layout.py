"""Passes as arrays: what the kernels on a GPU read says the same as the spans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.runner.forward_batch import Work, packed
from forerun.runner.gpu.layout import (
    BITS,
    HEAD,
    MAX_OWN_CELLS,
    MAX_ROWS,
    MAX_TILE_ROWS,
    PER_ROW,
    TILE,
    WORDS,
    Shape,
    describe,
    fits,
    shape_of,
)
from forerun.runner.slots import Slot

SLOT, CELL, IDS = 5000, 8, 100  # strides, and how many ids there are


@st.composite
def some_works(draw: st.DrawFn) -> list[Work]:
    """Sequences in slots of their own: pending tokens, new nodes, perhaps old ones before them."""
    works = []
    for index in range(draw(st.integers(1, 5))):
        slot = Slot(index)
        slot.tokens = [1] * draw(st.integers(0, 90))
        pending, old = draw(st.integers(0, 20)), draw(st.integers(0, 6))
        old = 0 if pending else old
        new = draw(st.integers(0 if pending else 1, 24))
        parents = np.array([draw(st.integers(-1, i - 1)) for i in range(old + new)], np.int32)
        works.append(
            Work(slot, [index + i for i in range(pending)], [50 + i for i in range(new)], parents)
        )
    return works


@given(some_works())
@settings(max_examples=150, deadline=None)
def test_rows_and_tiles_say_what_the_spans_say(works: list[Work]) -> None:
    if not fits(works):
        assert sum(work.num_rows for work in works) > MAX_ROWS
        return
    shape, rows = shape_of(works), packed(works, (SLOT, CELL), IDS, 1)
    total = sum(work.num_rows for work in works)
    array = describe(shape, rows, total, SLOT)
    assert len(array) == shape.size and array[0] == total
    fields = array[HEAD : HEAD + PER_ROW * shape.rows].reshape(PER_ROW, shape.rows)
    words = array[HEAD + PER_ROW * shape.rows :][: WORDS * shape.rows].reshape(shape.rows, WORDS)
    bits = (
        (words[:, :, None] >> np.arange(BITS) & 1).reshape(shape.rows, MAX_OWN_CELLS).astype(bool)
    )
    tiles = array[-TILE * shape.tiles :].reshape(shape.tiles, TILE)[: array[1]]
    assert not fields[:3, total:].any() and not bits[total:].any()
    first, wanted, covered = 0, [], []
    for work in works:
        span, num = work.span, work.num_rows
        part = slice(first, first + num)
        assert fields[0, part].tolist() == [*work.pending, *work.nodes]
        assert fields[1, part].tolist() == span.positions.tolist()
        cells = work.slot.index * SLOT + np.arange(span.start, span.stop) * CELL
        assert fields[2, part].tolist() == cells.tolist()
        own = span.stop - span.base
        sees = np.tri(num, own, own - num, dtype=bool) if span.sees is None else span.sees
        assert (bits[part, :own] == sees).all() and not bits[part, own:].any()
        wanted += range(first + work.first, first + num)
        for tile in tiles[(tiles[:, 0] >= first) & (tiles[:, 0] < first + num)]:
            assert tile[2:].tolist() == [work.slot.index * SLOT, span.base, span.stop]
            assert 0 < tile[1] <= shape.together
            covered += range(tile[0], tile[0] + tile[1])
        first += num
    assert covered == list(range(total))
    assert fields[3, : len(wanted)].tolist() == wanted


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([1], Shape(1, 1, 1)),
        ([1, 1, 1], Shape(4, 4, 1)),
        ([17], Shape(32, 2, MAX_TILE_ROWS)),
        ([3, 1, 20], Shape(32, 4, MAX_TILE_ROWS)),
        ([128], Shape(128, 8, MAX_TILE_ROWS)),
    ],
)
def test_few_shapes_serve_all_passes(rows: list[int], expected: Shape) -> None:
    assert shape_of([Work(Slot(i), [1] * num) for i, num in enumerate(rows)]) == expected


@pytest.mark.parametrize(
    ("pending", "old", "fit"), [(128, 0, 1), (129, 0, 0), (0, 255, 1), (0, 256, 0)]
)
def test_what_is_too_large_does_not_fit(pending: int, old: int, fit: bool) -> None:
    new = 0 if pending else 1
    parents = np.full(old + new, -1, np.int32)
    assert fits([Work(Slot(0), [1] * pending, [1] * new, parents)]) == fit
