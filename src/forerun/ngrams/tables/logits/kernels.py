"""Numba kernels of the logit memory: look up, average, evict.

A memory is a hash table with open addressing and linear probing. A slot's key is a 64-bit hash of a
context (its length and tokens); 0 is an empty slot. Contexts are stored most recent token first,
padded with -1. Two contexts share a key with probability 2^-64; a collision can make a draft worse,
never an output wrong.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from forerun.utils.jit import compiled, copy, kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_A = np.uint64(0xBF58476D1CE4E5B9)
MIX_B = np.uint64(0x94D049BB133111EB)
LOW = np.uint64(0xFFFFFFFF)
EMPTY_KEY = np.uint64(0)
TINY = 1e-200  # smaller weights become 0, so that -log(u) / q is finite

Arrays = tuple[Any, ...]  # a named tuple as a plain tuple, `table[:]`: less overhead per call


class Table(NamedTuple):
    """A hash table of C slots with K entries each."""

    keys: np.ndarray  # uint64 [C], 0 is empty
    counts: np.ndarray  # int32 [C], observations averaged so far
    stamps: np.ndarray  # int32 [C], clock of the last use
    ids: np.ndarray  # int32 [C, K]
    probs: np.ndarray  # float32 [C, K], falling, ties by id; ends at the first 0


class Temper(NamedTuple):
    """Sampling options for q: P^power, then top-k, top-p and min-p, normalised."""

    power: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def new_table(slots: int, entries: int) -> Table:
    """An empty table of at least two slots (arrays of one row have another Numba type).

    Keys are separate, because most searches end there. The other columns share one array, so that a
    look-up touches one page.
    """
    rows = np.zeros((max(2, slots), 2 + 2 * entries), np.int32)
    return Table(
        np.zeros(len(rows), np.uint64),
        rows[:, 0],
        rows[:, 1],
        rows[:, 2 : 2 + entries],
        rows[:, 2 + entries :].view(np.float32),
    )


NOTHING = new_table(2, 1)  # fallback of a memory without one


@kernel
def hash_context(context: np.ndarray, hashes: np.ndarray) -> int:
    """Writes hashes[n - 1] = key of the last n tokens; returns the number of tokens."""
    h = GOLDEN
    for n in range(len(context)):
        if context[n] < 0:
            return n
        h += np.uint64(context[n] + 1) * GOLDEN
        h = (h ^ (h >> np.uint64(30))) * MIX_A
        h = (h ^ (h >> np.uint64(27))) * MIX_B
        h ^= h >> np.uint64(31)
        hashes[n] = h if h != EMPTY_KEY else GOLDEN
    return len(context)


@kernel
def home(key: np.uint64, slots: int) -> Any:
    """The first slot of the search for a key: its high bits, scaled to the table's size."""
    return np.int64(((key >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32))


@kernel
def find(keys: np.ndarray, key: np.uint64) -> int:
    """The slot of `key`, or the empty slot for it."""
    slot = home(key, len(keys))
    while keys[slot] != key and keys[slot] != EMPTY_KEY:
        slot += 1
        if slot == len(keys):
            slot = 0
    return slot


@kernel(inline="always")
def find_longest(
    own: np.ndarray,
    fallback: np.ndarray,
    lengths: np.ndarray,
    context: np.ndarray,
    hashes: np.ndarray,
) -> tuple[int, int]:
    """The place and level (see `acceptance_prior`) of the longest known context.

    lengths: falling. own, fallback: keys of two tables; `fallback` is used if `own` lacks a
    length. A place is slot + 1 in `own` or -1 - slot in `fallback`; 0 if no length is known.
    """
    known = hash_context(context, hashes)
    for n in lengths:
        if n <= known:
            key = hashes[n - 1]
            slot = find(own, key)
            if own[slot] == key:
                return slot + 1, int(n < lengths[0])
            slot = find(fallback, key)
            if fallback[slot] == key:
                return -1 - slot, 2 + int(n < lengths[0])
    return 0, 0


@kernel
def write_q(
    table: Table, slot: int, clock: int, temper: Temper, ids: np.ndarray, probs: np.ndarray, at: int
) -> int:
    """Writes q of a slot to ids[at:], probs[at:], and its use time; returns the size.

    The size is 0 only for a slot without probabilities, which learning never makes.
    """
    if not table.probs[slot, 0] >= TINY:
        return 0
    table.stamps[slot] = clock
    most, total, read = table.ids.shape[1], 0.0, 0
    if 0 < temper.top_k < most:
        most = temper.top_k
    for j in range(most):
        x = np.float64(table.probs[slot, j])
        if temper.power != 1.0:  # relative to the largest, so the sum does not underflow
            x = (x / table.probs[slot, 0]) ** temper.power
        if x < TINY:
            break
        ids[at + j], probs[at + j] = table.ids[slot, j], x
        total += x
        read += 1
    enough = temper.top_p * total if temper.top_p < 1.0 else math.inf
    least = temper.min_p * probs[at]
    mass, size = 0.0, 0
    while size < read and mass < enough and probs[at + size] >= least:
        mass += probs[at + size]
        size += 1
    for j in range(at, at + size):
        probs[j] /= mass
    return size


@kernel(inline="always")
def look_up(
    own: Table,
    fallback: Table,
    lengths: np.ndarray,
    clock: int,
    context: np.ndarray,
    temper: Temper,
    hashes: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
    at: int,
) -> tuple[int, int]:
    """Writes q after a context, from entry `at`; returns its size (0: unknown) and level.

    hashes: uint64 [longest], scratch.
    """
    place, level = find_longest(own.keys, fallback.keys, lengths, context, hashes)
    if place > 0:
        return write_q(own, place - 1, clock, temper, ids, probs, at), level
    return write_q(fallback, -1 - place, clock, temper, ids, probs, at) if place else 0, level


@compiled
def learn(
    arrays: Arrays,
    lengths: np.ndarray,
    clock: int,
    root: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    nodes: np.ndarray,
    top_ids: np.ndarray,
    top_probs: np.ndarray,
) -> int:
    """Averages one observation per node into the slots of all its contexts.

    A node's context is its path below `root`; top_ids and top_probs [len(nodes), K] are the
    target's largest probabilities there. Returns the number of new keys. arrays: fields of a Table.
    """
    table = Table(*arrays)
    longest, entries, added = len(root), table.ids.shape[1], 0
    context, hashes = np.empty(longest, np.int32), np.empty(longest, np.uint64)
    ids, probs = np.empty(2 * entries, np.int32), np.empty(2 * entries, np.float32)
    for i in range(len(nodes)):
        fill_context(root, tokens, parents, nodes[i], context)
        known = hash_context(context, hashes)
        for n in lengths:
            if n > known:
                continue
            added += observe(table, hashes[n - 1], clock, top_ids[i], top_probs[i], ids, probs)
    return added


@kernel
def observe(
    table: Table,
    key: np.uint64,
    clock: int,
    new_ids: np.ndarray,
    new_probs: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
) -> int:
    """Averages one observation into the slot of a key; returns 1 if the key is new, else 0.

    new_probs fall. An observation without a probability above 0 is ignored. ids, probs [2 K]:
    scratch.
    """
    if not new_probs[0] > 0.0:  # also NaN
        return 0
    slot = find(table.keys, key)
    is_new = table.keys[slot] == EMPTY_KEY
    if is_new:
        table.keys[slot] = key
        table.counts[slot] = 0
        table.probs[slot] = 0.0
    average(table, slot, new_ids, new_probs, ids, probs)
    table.stamps[slot] = clock
    return int(is_new)


@kernel
def fill_context(
    root: np.ndarray, tokens: np.ndarray, parents: np.ndarray, node: int, context: np.ndarray
) -> None:
    """Writes the context of a node: its path, most recent token first, then `root`."""
    n = 0
    while node >= 0 and n < len(context):
        context[n] = tokens[node]
        node = parents[node]
        n += 1
    for above in range(len(context) - n):
        context[n + above] = root[above]


@kernel
def average(
    table: Table,
    slot: int,
    new_ids: np.ndarray,
    new_probs: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
) -> None:
    """P <- (k P + P_new) / (k + 1) over the union of ids (0 if absent), then the K largest."""
    entries, k = table.ids.shape[1], table.counts[slot]
    share = 1.0 / (k + 1.0)
    size = 0
    while size < entries and table.probs[slot, size] > 0.0:
        ids[size] = table.ids[slot, size]
        probs[size] = k * share * table.probs[slot, size]
        size += 1
    old = size
    for j in range(len(new_ids)):
        if not new_probs[j] > 0.0:
            break
        at = 0
        while at < old and ids[at] != new_ids[j]:
            at += 1
        if at < old:
            probs[at] += share * new_probs[j]
        else:
            ids[size], probs[size] = new_ids[j], share * new_probs[j]
            size += 1
    sort_falling(ids[:size], probs[:size])
    kept = min(size, entries)
    copy(ids[:kept], table.ids[slot])
    copy(probs[:kept], table.probs[slot])
    table.probs[slot, kept:] = 0.0
    table.counts[slot] = k + 1


@kernel
def sort_falling(ids: np.ndarray, probs: np.ndarray) -> None:
    """Insertion sort of a few pairs by falling probability, ties by id."""
    for i in range(1, len(ids)):
        token, p, at = ids[i], probs[i], i
        while at > 0 and (p > probs[at - 1] or (p == probs[at - 1] and token < ids[at - 1])):
            ids[at], probs[at] = ids[at - 1], probs[at - 1]
            at -= 1
        ids[at], probs[at] = token, p


@kernel
def move(old: Table, a: int, new: Table, b: int) -> None:
    """Copies slot a of one table to slot b of another."""
    new.keys[b] = old.keys[a]
    new.counts[b] = old.counts[a]
    new.stamps[b] = old.stamps[a]
    copy(old.ids[a], new.ids[b])
    copy(old.probs[a], new.probs[b])


@kernel
def rehash(old: Table, new: Table) -> None:
    """Copies every slot of a table into an empty table."""
    for slot in range(len(old.keys)):
        if old.keys[slot] != EMPTY_KEY:
            move(old, slot, new, find(new.keys, old.keys[slot]))


@kernel
def evict(table: Table, cut: int, ties: int) -> int:
    """Removes the slots with stamps below `cut`, and `ties` slots with stamp `cut`."""
    removed = 0
    for slot in range(len(table.keys)):
        while table.keys[slot] != EMPTY_KEY and table.stamps[slot] <= cut:
            if table.stamps[slot] == cut:
                if ties == 0:
                    break
                ties -= 1
            remove(table, slot)
            removed += 1
    return removed


@kernel
def remove(table: Table, hole: int) -> None:
    """Empties a slot and moves others, so that linear probing finds them (Knuth 6.4 R)."""
    slots, slot = len(table.keys), hole
    while True:
        slot += 1
        if slot == slots:
            slot = 0
        if table.keys[slot] == EMPTY_KEY:
            break
        distance = (slot - home(table.keys[slot], slots)) % slots
        if distance >= (slot - hole) % slots:  # the search for it passes the hole
            move(table, slot, table, hole)
            hole = slot
    table.keys[hole] = EMPTY_KEY
