"""Numba kernels of the tri-gram matrix: find a row, raise scores. Pure functions on arrays.

The table is that of `ngrams.tables.logits.kernels`: open addressing, linear probing; here
`counts` holds the size of a row and `probs` its scores, falling, ties by id. A key is the pair
(a, b) itself behind a bijection of 64-bit numbers, so no two pairs share one.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from forerun.ngrams.tables.logits.kernels import EMPTY_KEY, MIX_A, MIX_B, Table, find
from forerun.utils.jit import bare, copy


@bare
def mixed(pair: np.uint64) -> np.uint64:
    """The key of a << 32 | b; never 0, since only 0 is mapped to 0."""
    h = pair + np.uint64(1)
    h = (h ^ (h >> np.uint64(30))) * MIX_A
    h = (h ^ (h >> np.uint64(27))) * MIX_B
    return h ^ (h >> np.uint64(31))


@njit(cache=True, nogil=True)
def keys_of(pairs: np.ndarray) -> np.ndarray:
    """Keys of many pairs, uint64 [n]."""
    keys = np.empty(len(pairs), np.uint64)
    for i in range(len(pairs)):
        keys[i] = mixed(pairs[i])
    return keys


@bare
def key_of(a: int, b: int) -> np.uint64:
    """The key of the pair (a, b)."""
    return mixed((np.uint64(a) << np.uint64(32)) | np.uint64(b))


@bare
def row_of(own: Table, base: Table, a: int, b: int) -> int:
    """Where the row of (a, b) stands: slot s of `own` as s, of `base` as -2 - s; -1 is unknown."""
    key = key_of(a, b)
    slot = find(own.keys, key)
    if own.keys[slot] == key:
        return slot
    slot = find(base.keys, key)
    return -2 - slot if base.keys[slot] == key else -1


@bare
def nudge(
    own: Table, base: Table, tokens: np.ndarray, increment: float, cap: float, clock: int
) -> int:
    """Adds `increment` to every tri-gram of tokens, up to `cap`; returns how many rows are new.

    Only `own` is written; a row begins as that of `base`, if there is one.
    """
    new = 0
    for i in range(len(tokens) - 2):
        key = key_of(tokens[i], tokens[i + 1])
        slot = find(own.keys, key)
        if own.keys[slot] == EMPTY_KEY:
            copy_row(own, slot, base, key)
            new += 1
        own.stamps[slot] = clock
        own.counts[slot] = raise_score(
            own.ids[slot], own.probs[slot], own.counts[slot], tokens[i + 2], increment, cap
        )
    return new


@bare
def copy_row(own: Table, slot: int, base: Table, key: np.uint64) -> None:
    """Begins a row of `own`: a copy of that of `base`, or empty."""
    own.keys[slot] = key
    own.counts[slot] = 0
    found = find(base.keys, key)
    if base.keys[found] == key:
        own.counts[slot] = base.counts[found]
        copy(base.ids[found], own.ids[slot])
        copy(base.probs[found], own.probs[slot])


@bare
def raise_score(
    ids: np.ndarray, scores: np.ndarray, size: int, token: int, increment: float, cap: float
) -> int:
    """Raises one entry of a row and keeps the row sorted; returns its size."""
    at = 0
    while at < size and ids[at] != token:
        at += 1
    if at == size:
        size = min(size + 1, len(ids))
        at = size - 1  # of a full row the smallest makes room
        ids[at], scores[at] = token, 0.0
    score = np.float32(max(scores[at], min(cap, scores[at] + increment)))  # ties are seen as stored
    while at > 0 and (score > scores[at - 1] or (score == scores[at - 1] and token < ids[at - 1])):
        ids[at], scores[at] = ids[at - 1], scores[at - 1]
        at -= 1
    ids[at], scores[at] = token, score
    return size


@njit(cache=True, nogil=True)
def fill(
    table: Table, keys: np.ndarray, sizes: np.ndarray, ids: np.ndarray, scores: np.ndarray
) -> None:
    """Writes rows, end to end in ids and scores, into an empty table; stamps rise from 1."""
    start = 0
    for i in range(len(keys)):
        slot = find(table.keys, keys[i])
        table.keys[slot] = keys[i]
        size = sizes[i]
        table.counts[slot] = size
        table.stamps[slot] = i + 1
        table.ids[slot, :size] = ids[start : start + size]
        table.probs[slot, :size] = scores[start : start + size]
        start += size
