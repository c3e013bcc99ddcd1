"""One call per tree: the most promising places first, filled from a logit memory.

The fast form of the grower `dynamic` over `LogitMemory.lookup`: same nodes, same q, same uniforms
in the same order (tests compare them node by node).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.acceptance_prior import NUM_RANKS, AcceptanceCounts, grade
from forerun.core.records import Plan
from forerun.core.tree import POINT, SWOR, Tree
from forerun.ngrams.tables.logits.draft_template import Buffers, buffers, run, tree_of
from forerun.ngrams.tables.logits.kernels import Table, Temper, hash_context, home, recall, snapshot
from forerun.utils.jit import bare, copy, fetch

NOTES = 6  # what is noted of a node: of its q, next child, row
DEPTH, PLACE, SIZE, GRADE, RANK, ROW = range(NOTES)


class Room(NamedTuple):
    """Room to work in for N nodes, K entries and contexts of L tokens; node i is row i + 1."""

    contexts: np.ndarray  # int32 [N + 1, L], most recent token first
    notes: np.ndarray  # int32 [N + 1, NOTES]
    order: np.ndarray  # int16 [N + 1, K], of the entries of a q
    left: np.ndarray  # float64 [N + 1], see growers.dynamic
    value: np.ndarray  # float64 [N + 1], the same
    ids: np.ndarray  # int32 [K]
    probs: np.ndarray  # float64 [K]
    hashes: np.ndarray  # uint64 [L]
    ahead: np.ndarray  # int32 [L], a context that may come


def new_room(nodes: int, entries: int, longest: int) -> np.ndarray:
    """What a `Room` is laid out in. float64."""
    rows = nodes + 1
    return np.empty(rows * (2 + NOTES + longest + entries) + 2 * (entries + longest))


@bare
def laid_out(room: np.ndarray, nodes: int, entries: int, longest: int) -> Room:
    """The arrays that lie in `room`: a kernel is told of one in a fraction of the time."""
    rows = nodes + 1
    value = 2 * rows
    probs = value + entries
    hashes = probs + longest
    contexts = hashes + rows * longest
    notes = contexts + rows * NOTES
    order = notes + rows * entries
    ids = order + entries
    return Room(
        room[hashes:contexts].view(np.int32)[: rows * longest].reshape(rows, longest),
        room[contexts:notes].view(np.int32)[: rows * NOTES].reshape(rows, NOTES),
        room[notes:order].view(np.int16)[: rows * entries].reshape(rows, entries),
        room[:rows],
        room[rows:value],
        room[order:ids].view(np.int32)[:entries],
        room[value:probs],
        room[probs:hashes].view(np.uint64),
        room[ids : ids + longest].view(np.int32)[:longest],
    )


def grow(
    near: Table,
    far: Table,
    lengths: np.ndarray,
    clock: int,
    root: np.ndarray,
    plan: Plan,
    temper: Temper,
    chances: AcceptanceCounts,
    uniforms: np.ndarray | None,
    room: np.ndarray,
) -> tuple[Tree, int]:
    """A tree below context `root`: at most plan.nodes nodes of chances above plan.min_acceptance.

    With uniforms, children are drawn without replacement; without, they are the best tokens.
    Returns the tree, with its cells, and how many uniforms were used: one per entry of every q
    that has children.
    """
    out = buffers(plan.nodes, near.ids.shape[1])
    nodes, rows, used = grow_places(
        *near,
        *far,
        lengths,
        clock,
        *temper,
        root,
        plan.nodes,
        plan.depth,
        max(0.0, plan.min_acceptance),
        chances.hits,
        chances.tries,
        uniforms is not None,
        out.q_probs if uniforms is None else uniforms,
        *out,
        room,
    )
    return tree_of(out, nodes, rows, has_cells=True), used


@bare
def grow_places(
    near_keys: np.ndarray,
    near_counts: np.ndarray,
    near_stamps: np.ndarray,
    near_ids: np.ndarray,
    near_probs: np.ndarray,
    far_keys: np.ndarray,
    far_counts: np.ndarray,
    far_stamps: np.ndarray,
    far_ids: np.ndarray,
    far_probs: np.ndarray,
    lengths: np.ndarray,
    clock: int,
    power: float,
    top_k: int,
    top_p: float,
    min_p: float,
    root: np.ndarray,
    most: int,
    deepest: int,
    least: float,
    hits: np.ndarray,
    tries: np.ndarray,
    is_drawn: bool,
    uniforms: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    laws: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    q_ids: np.ndarray,
    q_probs: np.ndarray,
    cells: np.ndarray,
    room: np.ndarray,
) -> tuple[int, int, int]:
    """Best first; returns the numbers of nodes, proposals and uniforms used.

    Two Tables, a Temper, limits, what was learned of chances, Buffers. A node's place is kept, not
    its q: cold caches cost more than a second look into the slot.
    """
    near = Table(near_keys, near_counts, near_stamps, near_ids, near_probs)
    far = Table(far_keys, far_counts, far_stamps, far_ids, far_probs)
    work = laid_out(room, most, near_ids.shape[1], len(root))
    copy(root, work.contexts[0])
    return fill(
        near, far, lengths, clock, Temper(power, top_k, top_p, min_p), (most, deepest, least),
        (hits, tries), is_drawn, uniforms,
        Buffers(tokens, parents, laws, rows, starts, q_ids, q_probs, cells), work,
    )  # fmt: skip


@bare
def fill(
    near: Table,
    far: Table,
    lengths: np.ndarray,
    clock: int,
    how: Temper,
    limits: tuple[int, int, float],
    chances: tuple[np.ndarray, np.ndarray],
    is_drawn: bool,
    uniforms: np.ndarray,
    out: Buffers,
    work: Room,
) -> tuple[int, int, int]:
    """`grow_places` below the first context of `work`."""
    (most, deepest, least), (hits, tries) = limits, chances
    contexts, notes, order, left, value, ids, probs, hashes, ahead = work
    larger = near if len(near.keys) > len(far.keys) else far
    left[0], value[0] = 1.0, 0.0
    notes[0] = 0
    nodes = rows = used = filled = new = 0
    while nodes < most:
        note = notes[new]
        if note[DEPTH] < deepest:
            note[PLACE], level = recall(near.keys, far.keys, lengths, contexts[new], hashes)
            if note[PLACE]:
                note[SIZE] = snapshot_at(near, far, note[PLACE], clock, how, ids, probs, 0)
                note[GRADE] = grade(probs[0], level)
                value[new] = left[new] * chance(hits, tries, note[GRADE], 0)
        at = largest(value, nodes + 1)
        if value[at] <= least:
            break
        note = notes[at]
        place, size, rank = note[PLACE], note[SIZE], note[RANK]
        if rank == 0 and is_drawn:
            snapshot_at(near, far, place, clock, how, out.q_ids, out.q_probs, filled)
            run(uniforms, used, out.q_probs[filled : filled + size], order[at, :size], probs)
            note[ROW], used, rows, filled = rows, used + size, rows + 1, filled + size
            out.starts[rows] = filled
        token = token_at(near, far, place, order[at, rank] if is_drawn else rank)
        put(out, nodes, token, at - 1, is_drawn, note[ROW])
        out.cells[nodes] = note[GRADE] * NUM_RANKS + min(rank, NUM_RANKS - 1)
        new = nodes = nodes + 1
        notes[new] = 0
        left[new], value[new], notes[new, DEPTH] = value[at], 0.0, note[DEPTH] + 1
        extend(contexts[at], token, contexts[new])
        note[RANK] = rank = rank + 1
        left[at] -= value[at]
        value[at] = 0.0
        if rank < size:
            value[at] = left[at] * chance(hits, tries, note[GRADE], rank)
            token = token_at(near, far, place, order[at, rank] if is_drawn else rank)
            extend(contexts[at], token, ahead)
            fetch_context(larger, lengths, ahead, hashes)  # the other lies in caches
    return nodes, rows, used


@bare(inline="always")
def token_at(near: Table, far: Table, place: int, entry: int) -> int:
    """A token of the q at a place, as `snapshot_at` has them."""
    return near.ids[place - 1, entry] if place > 0 else far.ids[-1 - place, entry]


@bare
def extend(context: np.ndarray, token: int, longer: np.ndarray) -> None:
    """Writes the context that a token makes of another."""
    copy(context[:-1], longer[1:])
    longer[0] = token


@bare
def fetch_context(
    table: Table, lengths: np.ndarray, context: np.ndarray, hashes: np.ndarray
) -> None:
    """Asks memory for what `recall` and `snapshot` will read if this context is looked up."""
    known = hash_context(context, hashes)
    for n in lengths:
        if n <= known:
            slot = home(hashes[n - 1], len(table.keys))
            fetch(table.keys, slot)
            fetch(table.counts, slot)  # where its row begins
            fetch(table.probs, slot)


@bare(inline="always")
def snapshot_at(
    near: Table,
    far: Table,
    place: int,
    clock: int,
    how: Temper,
    ids: np.ndarray,
    probs: np.ndarray,
    at: int,
) -> int:
    """`snapshot` of a place: slot + 1 in `near`, or less than 0: -1 - slot in `far`."""
    if place > 0:  # choosing the table first takes a tenth longer
        return snapshot(near, place - 1, clock, how, ids, probs, at)
    return snapshot(far, -1 - place, clock, how, ids, probs, at)


@bare(inline="always")
def chance(hits: np.ndarray, tries: np.ndarray, row: int, rank: int) -> float:
    """That a child of this rank is accepted, below a q of grade `row`."""
    cell = row, min(rank, NUM_RANKS - 1)
    return hits[cell] / tries[cell]


@bare(inline="always")
def put(out: Buffers, node: int, token: int, parent: int, is_drawn: bool, row: int) -> None:
    """Writes a node; row: of the proposal that it was drawn from."""
    out.tokens[node], out.parents[node] = token, parent
    out.laws[node] = SWOR if is_drawn else POINT
    out.rows[node] = row if is_drawn else -1


@bare(inline="always")
def largest(value: np.ndarray, count: int) -> int:
    """Where the first of the largest values stands; NumPy's minds NaN and takes twice as long."""
    at = 0
    for i in range(1, count):
        at = i if value[i] > value[at] else at
    return at
