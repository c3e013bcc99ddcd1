"""Numba kernels of the logit memory: look up, average, evict. Pure functions on arrays.

A memory is one open-addressing table with linear probing. A slot's key is a 64-bit hash of a
context (its length and its tokens), 0 where the slot is empty; contexts are written most recent
token first and padded with -1 where the text is shorter. Two contexts share a key with probability
2^-64, which could cost a draft token its acceptance but never a wrong output.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from forerun.utils.jit import bare, copy

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_A = np.uint64(0xBF58476D1CE4E5B9)
MIX_B = np.uint64(0x94D049BB133111EB)
LOW = np.uint64(0xFFFFFFFF)
EMPTY_KEY = np.uint64(0)
TINY = 1e-200  # smaller weights are 0: an arrival -log(u) / q must stay finite

# A named tuple without its names, `table[:]`. Called from Python, a kernel reads a plain tuple of
# arrays in half a microsecond and a named one in three to eight, more where the caches are cold:
# kernels that run for every draft take plain ones and name them inside. One that is `bare` and
# takes the arrays one by one is called in half the time again.
Arrays = tuple[Any, ...]


class Table(NamedTuple):
    """C slots of K entries each. All of a slot but its key lies together: see `new_table`."""

    keys: np.ndarray  # uint64 [C], 0 is empty
    counts: np.ndarray  # int32 [C], observations averaged so far
    stamps: np.ndarray  # int32 [C], clock of the last hit
    ids: np.ndarray  # int32 [C, K]
    probs: np.ndarray  # float32 [C, K], falling, ties by id; the first 0 ends the entry


class Temper(NamedTuple):
    """How stored probabilities become q: P^power, then the cuts of the request, normalised."""

    power: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def new_table(slots: int, entries: int) -> Table:
    """An empty table of two slots or more, fewer have another type for kernels.

    Keys apart, since most searches end at keys; the rest in one row, since what a large table costs
    is the number of pages that a look-up touches: one here, three where columns lie apart.
    """
    rows = np.zeros((max(2, slots), 2 + 2 * entries), np.int32)
    return Table(
        np.zeros(len(rows), np.uint64),
        rows[:, 0],
        rows[:, 1],
        rows[:, 2 : 2 + entries],
        rows[:, 2 + entries :].view(np.float32),
    )


NOTHING = new_table(2, 1)  # behind a memory that stands alone


@bare
def hash_context(context: np.ndarray, hashes: np.ndarray) -> int:
    """hashes[n - 1] = key of the last n tokens; returns how many tokens there are."""
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


@bare
def home(key: np.uint64, slots: int) -> Any:
    """The slot where the search for a key begins: the high bits scaled to the table's size."""
    return np.int64(((key >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32))


@bare
def find(keys: np.ndarray, key: np.uint64) -> int:
    """The slot that holds `key`, or the empty slot where it belongs."""
    slot = home(key, len(keys))
    while keys[slot] != key and keys[slot] != EMPTY_KEY:
        slot += 1
        if slot == len(keys):
            slot = 0
    return slot


@bare(inline="always")  # passing a table on costs more than looking it up
def recall(
    near: np.ndarray, far: np.ndarray, lengths: np.ndarray, context: np.ndarray, hashes: np.ndarray
) -> tuple[int, int]:
    """The longest known context among `lengths` (falling): its place, and its level (`chances`).

    near, far: keys of two tables, the second asked at each length where the first knows nothing. A
    place is slot + 1 of the first or -1 - slot of the second; 0 if no length is known.
    """
    known = hash_context(context, hashes)
    for n in lengths:
        if n <= known:
            key = hashes[n - 1]
            slot = find(near, key)
            if near[slot] == key:
                return slot + 1, int(n < lengths[0])
            slot = find(far, key)
            if far[slot] == key:
                return -1 - slot, 2 + int(n < lengths[0])
    return 0, 0


@bare
def snapshot(
    table: Table, slot: int, clock: int, temper: Temper, ids: np.ndarray, probs: np.ndarray, at: int
) -> int:
    """Writes q of a slot, hit now, to ids[at:], probs[at:]; returns how many entries, never 0."""
    table.stamps[slot] = clock
    most, total, held = table.ids.shape[1], 0.0, 0
    if 0 < temper.top_k < most:
        most = temper.top_k
    for j in range(most):
        x = np.float64(table.probs[slot, j])
        if temper.power != 1.0:  # relative to the best, which never underflows
            x = (x / table.probs[slot, 0]) ** temper.power
        if x < TINY:
            break
        ids[at + j], probs[at + j] = table.ids[slot, j], x
        total += x
        held += 1
    enough = temper.top_p * total if temper.top_p < 1.0 else math.inf
    least = temper.min_p * probs[at]
    mass, size = 0.0, 0
    while size < held and mass < enough and probs[at + size] >= least:
        mass += probs[at + size]
        size += 1
    for j in range(at, at + size):
        probs[j] /= mass
    return size


@bare(inline="always")
def look_up(
    near: Table,
    far: Table,
    lengths: np.ndarray,
    clock: int,
    context: np.ndarray,
    temper: Temper,
    hashes: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
    at: int,
) -> tuple[int, int]:
    """q after one context, from entry `at` on; returns its size, 0 if none is known, and level.

    hashes: uint64 [longest], room to work in.
    """
    place, level = recall(near.keys, far.keys, lengths, context, hashes)
    if place > 0:
        return snapshot(near, place - 1, clock, temper, ids, probs, at), level
    return snapshot(far, -1 - place, clock, temper, ids, probs, at) if place else 0, level


@njit(cache=True, nogil=True)
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
    target's largest probabilities there. Returns the number of new keys. arrays: a Table.
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


@bare
def observe(
    table: Table,
    key: np.uint64,
    clock: int,
    new_ids: np.ndarray,
    new_probs: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
) -> int:
    """Averages one observation into the slot of a key, hit now; returns how many keys are new.

    ids, probs [2 K]: room to work in.
    """
    slot = find(table.keys, key)
    is_new = table.keys[slot] == EMPTY_KEY
    if is_new:
        table.keys[slot] = key
        table.counts[slot] = 0
        table.probs[slot] = 0.0
    average(table, slot, new_ids, new_probs, ids, probs)
    table.stamps[slot] = clock
    return int(is_new)


@bare
def fill_context(
    root: np.ndarray, tokens: np.ndarray, parents: np.ndarray, node: int, context: np.ndarray
) -> None:
    """The tokens that end at `node`, most recent first, continued above the tree by `root`."""
    n = 0
    while node >= 0 and n < len(context):
        context[n] = tokens[node]
        node = parents[node]
        n += 1
    for above in range(len(context) - n):
        context[n + above] = root[above]


@bare
def average(
    table: Table,
    slot: int,
    new_ids: np.ndarray,
    new_probs: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
) -> None:
    """P <- (k P + P_new) / (k + 1) over the union of ids (0 where absent), then the K largest."""
    entries, k = table.ids.shape[1], table.counts[slot]
    share = 1.0 / (k + 1.0)
    size = 0
    while size < entries and table.probs[slot, size] > 0.0:
        ids[size] = table.ids[slot, size]
        probs[size] = k * share * table.probs[slot, size]
        size += 1
    old = size
    for j in range(len(new_ids)):
        if new_probs[j] <= 0.0:
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


@bare
def sort_falling(ids: np.ndarray, probs: np.ndarray) -> None:
    """Insertion sort of a few pairs by falling probability, ties by id."""
    for i in range(1, len(ids)):
        token, p, at = ids[i], probs[i], i
        while at > 0 and (p > probs[at - 1] or (p == probs[at - 1] and token < ids[at - 1])):
            ids[at], probs[at] = ids[at - 1], probs[at - 1]
            at -= 1
        ids[at], probs[at] = token, p


@bare
def move(old: Table, a: int, new: Table, b: int) -> None:
    """Copies slot a of one table to slot b of another."""
    new.keys[b] = old.keys[a]
    new.counts[b] = old.counts[a]
    new.stamps[b] = old.stamps[a]
    copy(old.ids[a], new.ids[b])
    copy(old.probs[a], new.probs[b])


@bare
def rehash(old: Table, new: Table) -> None:
    """Copies every entry of one table into another, empty one."""
    for slot in range(len(old.keys)):
        if old.keys[slot] != EMPTY_KEY:
            move(old, slot, new, find(new.keys, old.keys[slot]))


@bare
def evict(table: Table, cut: int, ties: int) -> int:
    """Removes, in place, all slots last hit before `cut` and `ties` of those hit at it."""
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


@bare
def remove(table: Table, hole: int) -> None:
    """Empties a slot and closes the gap, so that linear probing finds all others (Knuth 6.4 R)."""
    slots, slot = len(table.keys), hole
    while True:
        slot += 1
        if slot == slots:
            slot = 0
        if table.keys[slot] == EMPTY_KEY:
            break
        distance = (slot - home(table.keys[slot], slots)) % slots
        if distance >= (slot - hole) % slots:  # its search passes the hole: move it there
            move(table, slot, table, hole)
            hole = slot
    table.keys[hole] = EMPTY_KEY
