"""Suffix arrays against sorting, whole and merged from parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ngrams.index.build import merge as merging
from forerun.ngrams.index.build.suffix_array import (
    TYPES,
    find_buckets,
    pack,
    pointer,
    pointer_width,
    separator,
    sort_part,
    suffix_array,
    unpack,
)

texts = st.lists(st.integers(0, 4), max_size=80)


def by_sorting(text: list[int]) -> list[int]:
    return sorted(range(len(text)), key=lambda i: text[i:])


def with_separators(ids: list[int], width: int) -> np.ndarray:
    """Every 4 becomes a separator."""
    end = separator(TYPES[width])
    return np.array([end if i == 4 else i for i in ids], TYPES[width])


@settings(max_examples=150, deadline=None)
@given(texts, st.sampled_from([1, 2, 4]))
def test_order_is_that_of_sorting(ids: list[int], width: int) -> None:
    text = with_separators(ids, width)
    assert suffix_array(text).tolist() == by_sorting(text.tolist())


@pytest.mark.parametrize(
    "text",
    [[], [0], [7] * 50, [1, 2] * 40, [3, 2, 1, 0], [0, 1, 2, 3], [2, 1, 2, 1, 2, 0, 2, 1, 2, 1]],
)
def test_repeats_and_runs(text: list[int]) -> None:
    for width in TYPES:
        assert suffix_array(np.array(text, TYPES[width])).tolist() == by_sorting(text)


def test_wide_positions_give_the_same() -> None:
    from forerun.ngrams.index.build.sais import sort_suffixes

    text = np.random.default_rng(0).integers(0, 9, 3000).astype(np.uint16)
    narrow, wide = np.empty(3000, np.int32), np.empty(3000, np.int64)
    sort_suffixes(text, narrow, 10)
    sort_suffixes(text, wide, 10)
    assert np.array_equal(narrow, wide) and narrow.tolist() == by_sorting(text.tolist())


def test_rare_large_ids_need_no_counter_each() -> None:
    text = np.random.default_rng(1).integers(0, 1 << 32, 200, dtype=np.uint32)
    assert suffix_array(text).tolist() == by_sorting(text.tolist())
    buckets, shift = find_buckets(text, int(text.max()))
    assert len(buckets) < 1 << 21 and shift == 12 and buckets[-1] == 200


@settings(max_examples=120, deadline=None)
@given(texts.filter(bool), st.sampled_from([1, 2, 4]), st.integers(1, 40), st.integers(1, 5))
def test_parts_merge_to_the_whole(ids: list[int], width: int, part: int, slices: int) -> None:
    text = with_separators(ids, width)
    n, bytes_each, overlap = len(text), pointer_width(len(text)), len(text)
    borders = np.append(np.arange(0, n, part), n).astype(np.int64)
    tables = [
        pack(sort_part(text, a, b, overlap, 4).astype(np.int64) + a, bytes_each)
        for a, b in zip(borders[:-1], borders[1:], strict=True)
    ]
    table = np.concatenate(tables)
    cuts = merging.cut(text, table, bytes_each, borders, slices, overlap)
    found = []
    for low, high in zip(cuts[:-1], cuts[1:], strict=True):
        merge = merging.begin(low, high)
        out = np.empty(3 * bytes_each, np.uint8)  # a few at a time
        while count := merging.advance(text, table, bytes_each, merge, overlap, out):
            found += unpack(out[: count * bytes_each], bytes_each).tolist()
    assert found == suffix_array(text).tolist()


def test_repeats_beyond_the_overlap_stay_a_permutation() -> None:
    """A part knows no more than the overlap: such suffixes may be out of order, none is lost."""
    text = np.zeros(500, np.uint16)
    borders = np.array([0, 170, 333, 500], np.int64)
    tables = [
        pack(sort_part(text, a, b, 5, 0).astype(np.int64) + a, 2)
        for a, b in zip(borders[:-1], borders[1:], strict=True)
    ]
    table = np.concatenate(tables)
    cuts = merging.cut(text, table, 2, borders, 4, 5)
    found = []
    for low, high in zip(cuts[:-1], cuts[1:], strict=True):
        merge, out = merging.begin(low, high), np.empty(2000, np.uint8)
        while count := merging.advance(text, table, 2, merge, 5, out):
            found += unpack(out[: 2 * count], 2).tolist()
    assert sorted(found) == list(range(500))


@given(st.lists(st.integers(0, (1 << 40) - 1)))
def test_positions_are_packed_and_unpacked(positions: list[int]) -> None:
    table = pack(np.array(positions, np.int64), 5)
    assert unpack(table, 5).tolist() == positions
    assert [pointer(table, 5, i) for i in range(len(positions))] == positions


def test_pointer_widths() -> None:
    assert [pointer_width(n) for n in (0, 1, 256, 257, 1 << 24, (1 << 24) + 1, 1 << 32)] == [
        1,
        1,
        1,
        2,
        3,
        4,
        4,
    ]
