"""A wavelet matrix: a string of integers with access, rank and range-symbol queries.

Claude, Navarro and Ordóñez, "The wavelet matrix: An efficient wavelet tree for large alphabets",
2015. Each level, from the highest bit to the lowest, stores one bit per symbol and stably sorts the
symbols by it. A bit vector is an array of 64-byte blocks, one cache line each: the number of ones
before the block, and 448 bits. A symbol takes 8/7 bit per level.

Laws: `access` returns the string; `rank` and `symbols` equal counting in it (tests).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.utils.jit import compiled

WORDS, BITS = 8, 448  # per block; the first word is a count
M1, M2 = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
M4, H01 = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)


class Wavelet(NamedTuple):
    """A string of n symbols below 2 ** levels."""

    blocks: np.ndarray  # uint64 [levels, n // 448 + 1, 8]
    zeros: np.ndarray  # int64 [levels]: number of bits that are 0


def empty_blocks(levels: int, length: int) -> np.ndarray:
    """Zero blocks for bit vectors of a length, aligned to cache lines."""
    count = levels * (length // BITS + 1) * WORDS
    buffer = np.zeros(count + WORDS, np.uint64)
    skip = (-buffer.ctypes.data % 64) // 8
    return buffer[skip : skip + count].reshape(levels, -1, WORDS)


def aligned(blocks: np.ndarray) -> np.ndarray:
    """A copy of blocks, aligned to cache lines."""
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


@compiled
def sort_level(symbols: np.ndarray, out: np.ndarray, shift: int, blocks: np.ndarray) -> int:
    """Writes a level's bits and the symbols sorted by them; returns the number of 0 bits."""
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


@compiled
def set_bit(blocks: np.ndarray, i: int) -> None:
    """Sets bit i of a vector; call `count_blocks` afterwards."""
    block, offset = i // BITS, i % BITS
    blocks[block, 1 + (offset >> 6)] |= np.uint64(1) << np.uint64(offset & 63)


@compiled
def count_blocks(blocks: np.ndarray) -> None:
    """Writes the number of ones before each block."""
    total = np.uint64(0)
    for b in range(len(blocks)):
        blocks[b, 0] = total
        for w in range(1, WORDS):
            total += popcount(blocks[b, w])


@compiled
def popcount(x: np.uint64) -> np.uint64:
    """Number of ones in a word; compilers turn this form into one instruction."""
    x = x - ((x >> np.uint64(1)) & M1)
    x = (x & M2) + ((x >> np.uint64(2)) & M2)
    x = (x + (x >> np.uint64(4))) & M4
    return (x * H01) >> np.uint64(56)


@compiled
def is_set(blocks: np.ndarray, i: int) -> bool:
    """Bit i of a vector; an i outside its blocks is moved to the nearest bit."""
    i = max(0, min(i, len(blocks) * BITS - 1))
    block, offset = i // BITS, i % BITS
    word = blocks[block, 1 + (offset >> 6)]
    return bool((word >> np.uint64(offset & 63)) & np.uint64(1))


@compiled
def ones(blocks: np.ndarray, i: int) -> int:
    """Ones among the first i bits of a vector; an i outside its blocks is moved to the nearest."""
    i = max(0, min(i, len(blocks) * BITS - 1))
    block, offset = i // BITS, i % BITS
    last = offset >> 6
    total = blocks[block, 0]
    for w in range(last):
        total += popcount(blocks[block, 1 + w])
    rest = np.uint64(offset & 63)
    if rest:
        total += popcount(blocks[block, 1 + last] & ((np.uint64(1) << rest) - np.uint64(1)))
    return np.int64(total)  # type: ignore[return-value]


@compiled
def descend(wavelet: Wavelet, symbol: int, left: int, right: int) -> tuple[int, int]:
    """A symbol's range within [left, right) after the last level; minus `firsts`: its ranks."""
    levels = len(wavelet.zeros)
    for level in range(levels):
        a, b = ones(wavelet.blocks[level], left), ones(wavelet.blocks[level], right)
        if (symbol >> (levels - 1 - level)) & 1:
            left, right = wavelet.zeros[level] + a, wavelet.zeros[level] + b
        else:
            left, right = left - a, right - b
    return left, right


@compiled
def firsts(wavelet: Wavelet, out: np.ndarray) -> None:
    """Writes the begin of each symbol after the last level. int64 [symbols]."""
    for symbol in range(len(out)):
        out[symbol] = descend(wavelet, symbol, 0, 0)[0]


@compiled
def access(wavelet: Wavelet, i: int) -> tuple[int, int]:
    """The symbol at position i, and its position after the last level."""
    symbol = 0
    for level in range(len(wavelet.zeros)):
        before = ones(wavelet.blocks[level], i)
        if is_set(wavelet.blocks[level], i):
            symbol, i = 2 * symbol + 1, wavelet.zeros[level] + before
        else:
            symbol, i = 2 * symbol, i - before
    return symbol, i


@compiled
def symbols(wavelet: Wavelet, left: int, right: int, found: np.ndarray, counts: np.ndarray) -> int:
    """Writes the distinct symbols in [left, right), ascending, and their counts.

    Returns their number, at most len(found).
    """
    levels = len(wavelet.zeros)
    stack = np.empty((levels + 1, 4), np.int64)  # level, symbol so far, left, right
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = 0, 0, left, right
    num, size = 1 if left < right else 0, 0
    while num and size < len(found):
        num -= 1
        level, symbol, a, b = stack[num]
        while level < levels:
            x, y = ones(wavelet.blocks[level], a), ones(wavelet.blocks[level], b)
            start = wavelet.zeros[level]
            level += 1
            if y - x == b - a:
                symbol, a, b = 2 * symbol + 1, start + x, start + y
                continue
            if x < y:
                stack[num, 0], stack[num, 1] = level, 2 * symbol + 1
                stack[num, 2], stack[num, 3] = start + x, start + y
                num += 1
            symbol, a, b = 2 * symbol, a - x, b - y
        found[size], counts[size] = symbol, b - a
        size += 1
    return size
