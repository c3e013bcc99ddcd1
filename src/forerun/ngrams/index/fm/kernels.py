"""Kernels of the FM-index: the transform, the backward search, and walks along the text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.ngrams.index.fm import wavelet
from forerun.ngrams.index.fm.wavelet import Wavelet, access, descend
from forerun.utils.jit import compiled


class Rows(NamedTuple):
    """The arrays of the kernels. A symbol is 1 + the rank of its id in `ids`; 0 is the text's end.

    transform: BWT of the n + 1 rows. shifts int64 [symbols]: C[c] minus the begin of c after the
    last wavelet level. marks uint64 [1, blocks, 8]: rows with a stored position. kept int64: these
    positions / `sample`, in row order.
    """

    transform: Wavelet
    shifts: np.ndarray
    marks: np.ndarray
    kept: np.ndarray
    sample: int


def make_rows(bwt: Wavelet, length: int, marks: np.ndarray, kept: np.ndarray, sample: int) -> Rows:
    """The arrays of the kernels; `shifts` is computed from the BWT."""
    num_symbols = 1 << len(bwt.zeros)
    begins = np.empty(num_symbols, np.int64)
    wavelet.firsts(bwt, begins)
    counts = np.zeros(num_symbols, np.int64)
    found, sizes = np.empty(num_symbols, np.int64), np.empty(num_symbols, np.int64)
    num = wavelet.symbols(bwt, 0, length, found, sizes)
    counts[found[:num]] = sizes[:num]
    smaller = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)[:-1]])
    return Rows(bwt, smaller - begins, marks, kept, sample)


@compiled
def transform(
    symbols: np.ndarray,
    order: np.ndarray,
    sample: int,
    out: np.ndarray,
    marks: np.ndarray,
    kept: np.ndarray,
) -> None:
    """Writes the BWT of a text [n] with suffix array `order` [n] to `out` [n + 1].

    Row 0 is the text's end. marks, kept: see `Rows`.
    """
    n, size = len(symbols), 0
    for row in range(n + 1):
        at = n if row == 0 else np.int64(order[row - 1])
        out[row] = symbols[at - 1] if at else 0
        if at % sample == 0:
            wavelet.set_bit(marks, row)
            kept[size] = at // sample
            size += 1
    wavelet.count_blocks(marks)


@compiled
def step(rows: Rows, symbol: int, left: int, right: int) -> tuple[int, int]:
    """One step of the backward search; (0, 0) if the interval is empty."""
    left, right = descend(rows.transform, symbol, left, right)
    if left >= right:
        return 0, 0
    return left + rows.shifts[symbol], right + rows.shifts[symbol]


@compiled
def find(
    rows: Rows, symbols: np.ndarray, pattern: np.ndarray, left: int, right: int
) -> tuple[int, int]:
    """The rows of a pattern of ids within [left, right). symbols: symbol per id, 0 for none."""
    for token in pattern:
        if token < 0 or token >= len(symbols) or symbols[token] == 0 or left >= right:
            return 0, 0
        left, right = step(rows, symbols[token], left, right)
    return left, right


@compiled
def locate(rows: Rows, left: int, length: int, out: np.ndarray) -> None:
    """Writes the end positions of the occurrences at rows from `left`."""
    for i in range(len(out)):
        row, walked = left + i, 0
        while walked < rows.sample and not wavelet.is_set(rows.marks[0], row):
            symbol, row = access(rows.transform, row)
            row += rows.shifts[symbol]
            walked += 1
        place = wavelet.ones(rows.marks[0], row)
        at = rows.kept[max(0, min(place, len(rows.kept) - 1))] * rows.sample + walked
        out[i] = length - at


@compiled
def walk(rows: Rows, row: int, skip: int, out: np.ndarray) -> None:
    """Writes the symbols from a row in reading order, after skipping `skip` of them."""
    for i in range(skip + len(out)):
        symbol, row = access(rows.transform, row)
        row += rows.shifts[symbol]
        if i >= skip:
            out[i - skip] = symbol


@compiled
def read_bits(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes the bits of a vector, one byte each."""
    for i in range(len(out)):
        out[i] = wavelet.is_set(blocks, i)
