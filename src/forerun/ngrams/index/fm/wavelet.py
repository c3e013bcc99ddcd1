"""A wavelet matrix: a string of integers that answers access, rank and "which symbols are here?".

Claude, Navarro and Ordóñez, "The wavelet matrix: An efficient wavelet tree for large alphabets",
2015. Level by level, from the highest bit of the symbols to the lowest, one bit per place is kept,
and places are sorted by that bit without changing their order otherwise. A bit vector is a row of
blocks of 64 bytes, a cache line each: how many ones come before the block, and 448 bits. A symbol
thus takes 8/7 bit per level, and each level costs a query one cache line per end of its range.

Laws: `access` gives the string back, `rank` and `symbols` equal counting in it (tests).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

WORDS, BITS = 8, 448  # words of a block, the first of which counts; bits of a block
M1, M2 = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
M4, H01 = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)


class Wavelet(NamedTuple):
    """A string of n symbols below 2 ** levels."""

    blocks: np.ndarray  # uint64 [levels, n // 448 + 1, 8]
    zeros: np.ndarray  # int64 [levels]: places whose bit is 0


def empty_blocks(levels: int, length: int) -> np.ndarray:
    """Blocks of zeros for bit vectors of a length, each on a cache line of its own."""
    count = levels * (length // BITS + 1) * WORDS
    room = np.zeros(count + WORDS, np.uint64)
    skip = (-room.ctypes.data % 64) // 8
    return room[skip : skip + count].reshape(levels, -1, WORDS)


def aligned(blocks: np.ndarray) -> np.ndarray:
    """A copy of blocks that lie elsewhere, such as in a file."""
    out = empty_blocks(1, max(0, blocks.size // WORDS - 1) * BITS).reshape(-1)
    out[:] = blocks.reshape(-1)
    return out.reshape(blocks.shape)


def make(symbols: np.ndarray, levels: int) -> Wavelet:
    """The wavelet matrix of symbols [n], unsigned and below 2 ** levels; overwrites them."""
    blocks, zeros = empty_blocks(levels, len(symbols)), np.zeros(levels, np.int64)
    spare = np.empty_like(symbols)
    for level in range(levels):
        zeros[level] = sort_level(symbols, spare, levels - 1 - level, blocks[level])
        symbols, spare = spare, symbols
    return Wavelet(blocks, zeros)


@njit(cache=True, nogil=True)
def sort_level(symbols: np.ndarray, out: np.ndarray, shift: int, blocks: np.ndarray) -> int:
    """Writes a level's bits and the symbols sorted by it; returns how many bits are 0."""
    zeros = 0
    for i in range(len(symbols)):
        if (symbols[i] >> shift) & 1:
            set_bit(blocks, i)
        else:
            out[zeros] = symbols[i]
            zeros += 1
    at = zeros
    for i in range(len(symbols)):
        if (symbols[i] >> shift) & 1:
            out[at] = symbols[i]
            at += 1
    count_blocks(blocks)
    return zeros


@njit(cache=True, nogil=True)
def set_bit(blocks: np.ndarray, i: int) -> None:
    """Sets bit i of a vector; `count_blocks` is due afterwards."""
    block, offset = i // BITS, i % BITS
    blocks[block, 1 + (offset >> 6)] |= np.uint64(1) << np.uint64(offset & 63)


@njit(cache=True, nogil=True)
def count_blocks(blocks: np.ndarray) -> None:
    """Writes how many ones come before each block."""
    total = np.uint64(0)
    for b in range(len(blocks)):
        blocks[b, 0] = total
        for w in range(1, WORDS):
            total += popcount(blocks[b, w])


@njit(cache=True, nogil=True)
def popcount(x: np.uint64) -> np.uint64:
    """Ones of a word; compilers know this form and take one instruction for it."""
    x = x - ((x >> np.uint64(1)) & M1)
    x = (x & M2) + ((x >> np.uint64(2)) & M2)
    x = (x + (x >> np.uint64(4))) & M4
    return (x * H01) >> np.uint64(56)


@njit(cache=True, nogil=True)
def is_set(blocks: np.ndarray, i: int) -> bool:
    """Bit i of a vector."""
    block, offset = i // BITS, i % BITS
    word = blocks[block, 1 + (offset >> 6)]
    return bool((word >> np.uint64(offset & 63)) & np.uint64(1))


@njit(cache=True, nogil=True)
def ones(blocks: np.ndarray, i: int) -> int:
    """Ones among the first i bits of a vector."""
    block, offset = i // BITS, i % BITS
    last = offset >> 6
    total = blocks[block, 0]
    for w in range(last):
        total += popcount(blocks[block, 1 + w])
    rest = np.uint64(offset & 63)
    if rest:
        total += popcount(blocks[block, 1 + last] & ((np.uint64(1) << rest) - np.uint64(1)))
    return np.int64(total)  # type: ignore[return-value]


@njit(cache=True, nogil=True)
def descend(wavelet: Wavelet, symbol: int, left: int, right: int) -> tuple[int, int]:
    """Where a symbol's places in [left, right) lie after the last level; less `first` are ranks."""
    levels = len(wavelet.zeros)
    for level in range(levels):
        a, b = ones(wavelet.blocks[level], left), ones(wavelet.blocks[level], right)
        if (symbol >> (levels - 1 - level)) & 1:
            left, right = wavelet.zeros[level] + a, wavelet.zeros[level] + b
        else:
            left, right = left - a, right - b
    return left, right


@njit(cache=True, nogil=True)
def firsts(wavelet: Wavelet, out: np.ndarray) -> None:
    """Where each symbol's places begin after the last level. int64 [symbols]."""
    for symbol in range(len(out)):
        out[symbol] = descend(wavelet, symbol, 0, 0)[0]


@njit(cache=True, nogil=True)
def access(wavelet: Wavelet, i: int) -> tuple[int, int]:
    """The symbol at place i, and where that place lies after the last level."""
    symbol = 0
    for level in range(len(wavelet.zeros)):
        before = ones(wavelet.blocks[level], i)
        if is_set(wavelet.blocks[level], i):
            symbol, i = 2 * symbol + 1, wavelet.zeros[level] + before
        else:
            symbol, i = 2 * symbol, i - before
    return symbol, i


@njit(cache=True, nogil=True)
def symbols(wavelet: Wavelet, left: int, right: int, found: np.ndarray, counts: np.ndarray) -> int:
    """The different symbols in [left, right), ascending, and their counts; returns how many."""
    levels = len(wavelet.zeros)
    waiting = np.empty((levels + 1, 4), np.int64)  # level, symbol so far, left, right
    waiting[0, 0], waiting[0, 1], waiting[0, 2], waiting[0, 3] = 0, 0, left, right
    num, size = 1 if left < right else 0, 0
    while num:
        num -= 1
        level, symbol, a, b = waiting[num]
        while level < levels:
            x, y = ones(wavelet.blocks[level], a), ones(wavelet.blocks[level], b)
            start = wavelet.zeros[level]
            level += 1
            if y - x == b - a:
                symbol, a, b = 2 * symbol + 1, start + x, start + y
                continue
            if x < y:
                waiting[num, 0], waiting[num, 1] = level, 2 * symbol + 1
                waiting[num, 2], waiting[num, 3] = start + x, start + y
                num += 1
            symbol, a, b = 2 * symbol, a - x, b - y
        found[size], counts[size] = symbol, b - a
        size += 1
    return size
