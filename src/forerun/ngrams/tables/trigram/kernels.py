"""Numba kernels of the tri-gram matrix: find a row, raise scores.

The hash table is that of `ngrams.tables.logits.kernels`. Here `counts` is the size of a row and
`probs` its scores, falling, ties by id. A key is a bijective hash of the pair (a, b), so two pairs
never share a key.
"""

from __future__ import annotations

import numpy as np

from forerun.ngrams.tables.logits.kernels import EMPTY_KEY, MIX_A, MIX_B, Table, find
from forerun.utils.jit import compiled, copy, kernel


@kernel
def mixed(pair: np.uint64) -> np.uint64:
    """The key of a << 32 | b, a bijection; never 0, because only 0 maps to 0."""
    h = pair + np.uint64(1)
    h = (h ^ (h >> np.uint64(30))) * MIX_A
    h = (h ^ (h >> np.uint64(27))) * MIX_B
    return h ^ (h >> np.uint64(31))


@compiled
def keys_of(pairs: np.ndarray) -> np.ndarray:
    """Keys of many pairs, uint64 [n]."""
    keys = np.empty(len(pairs), np.uint64)
    for i in range(len(pairs)):
        keys[i] = mixed(pairs[i])
    return keys


@kernel
def key_of(a: int, b: int) -> np.uint64:
    """The key of the pair (a, b)."""
    return mixed((np.uint64(a) << np.uint64(32)) | np.uint64(b))


@kernel
def row_of(own: Table, base: Table, a: int, b: int) -> int:
    """The place of the row of (a, b): s for slot s of `own`, -2 - s of `base`; -1: unknown."""
    key = key_of(a, b)
    slot = find(own.keys, key)
    if own.keys[slot] == key:
        return slot
    slot = find(base.keys, key)
    return -2 - slot if base.keys[slot] == key else -1


@kernel
def nudge(
    own: Table, base: Table, tokens: np.ndarray, increment: float, cap: float, clock: int
) -> int:
    """Adds `increment` to every tri-gram of tokens, up to `cap`; returns the number of new rows.

    Only `own` is written. A new row is copied from `base` if it exists there.
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


@kernel
def copy_row(own: Table, slot: int, base: Table, key: np.uint64) -> None:
    """Creates a row in `own`: a copy of the row in `base`, or empty."""
    own.keys[slot] = key
    own.counts[slot] = 0
    found = find(base.keys, key)
    if base.keys[found] == key:
        own.counts[slot] = base.counts[found]
        copy(base.ids[found], own.ids[slot])
        copy(base.probs[found], own.probs[slot])


@kernel
def raise_score(
    ids: np.ndarray, scores: np.ndarray, size: int, token: int, increment: float, cap: float
) -> int:
    """Raises one entry of a row and keeps the row sorted; returns its size."""
    at = 0
    while at < size and ids[at] != token:
        at += 1
    if at == size:
        size = min(size + 1, len(ids))
        at = size - 1  # a full row loses its smallest entry
        ids[at], scores[at] = token, 0.0
    score = np.float32(
        max(scores[at], min(cap, scores[at] + increment))
    )  # rounded as stored, for ties
    while at > 0 and (score > scores[at - 1] or (score == scores[at - 1] and token < ids[at - 1])):
        ids[at], scores[at] = ids[at - 1], scores[at - 1]
        at -= 1
    ids[at], scores[at] = token, score
    return size


@compiled
def fill(
    table: Table, keys: np.ndarray, sizes: np.ndarray, ids: np.ndarray, scores: np.ndarray
) -> None:
    """Writes concatenated rows into an empty table; stamps are 1, 2, ..."""
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
