"""Grows a tree best first from a logit memory, in one call.

The compiled form of grower `dynamic` over `LogitMemory.lookup`: same nodes, same q, same uniforms
in the same order (tests compare them).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.acceptance_prior import NUM_RANKS, AcceptanceCounts, grade
from forerun.core.records import Plan
from forerun.core.tree import POINT, SWOR, Tree
from forerun.ngrams.tables.logits.draft_template import Buffers, buffers, draw, tree_of
from forerun.ngrams.tables.logits.kernels import (
    Table,
    Temper,
    find_longest,
    hash_context,
    home,
    write_q,
)
from forerun.utils.jit import copy, fetch, kernel

NUM_STATES = 6  # columns of Workspace.states
DEPTH, PLACE, SIZE, GRADE, RANK, ROW = range(NUM_STATES)


class Workspace(NamedTuple):
    """Scratch arrays for N nodes, K entries and contexts of L tokens; node i is row i + 1."""

    contexts: np.ndarray  # int32 [N + 1, L], most recent token first
    states: np.ndarray  # int32 [N + 1, NUM_STATES]
    order: np.ndarray  # int16 [N + 1, K], order of the entries of a q
    left: np.ndarray  # float64 [N + 1], see growers.dynamic
    value: np.ndarray  # float64 [N + 1], see growers.dynamic
    ids: np.ndarray  # int32 [K]
    probs: np.ndarray  # float64 [K]
    hashes: np.ndarray  # uint64 [L]
    ahead: np.ndarray  # int32 [L], context of the next candidate


def new_workspace(nodes: int, entries: int, longest: int) -> np.ndarray:
    """The buffer of a `Workspace`, float64; one argument instead of nine for the kernel."""
    rows = nodes + 1
    return np.empty(rows * (2 + NUM_STATES + longest + entries) + 2 * (entries + longest))


@kernel
def split_workspace(buffer: np.ndarray, nodes: int, entries: int, longest: int) -> Workspace:
    """The arrays of a workspace as views of its buffer."""
    rows = nodes + 1
    value = 2 * rows
    probs = value + entries
    hashes = probs + longest
    contexts = hashes + rows * longest
    states = contexts + rows * NUM_STATES
    order = states + rows * entries
    ids = order + entries
    return Workspace(
        buffer[hashes:contexts].view(np.int32)[: rows * longest].reshape(rows, longest),
        buffer[contexts:states].view(np.int32)[: rows * NUM_STATES].reshape(rows, NUM_STATES),
        buffer[states:order].view(np.int16)[: rows * entries].reshape(rows, entries),
        buffer[:rows],
        buffer[rows:value],
        buffer[order:ids].view(np.int32)[:entries],
        buffer[value:probs],
        buffer[probs:hashes].view(np.uint64),
        buffer[ids : ids + longest].view(np.int32)[:longest],
    )


def grow(
    own: Table,
    fallback: Table,
    lengths: np.ndarray,
    clock: int,
    root: np.ndarray,
    plan: Plan,
    temper: Temper,
    acceptance: AcceptanceCounts,
    uniforms: np.ndarray | None,
    buffer: np.ndarray,
) -> tuple[Tree, int]:
    """A tree below context `root`: at most plan.nodes nodes of values above plan.min_acceptance.

    With uniforms, children are drawn without replacement; without, they are the most likely tokens.
    Returns the tree, with its cells, and the number of uniforms used: one per entry of every q with
    children.
    """
    out = buffers(plan.nodes, own.ids.shape[1])
    nodes, rows, used = grow_places(
        *own,
        *fallback,
        lengths,
        clock,
        *temper,
        root,
        plan.nodes,
        plan.depth,
        max(0.0, plan.min_acceptance),
        acceptance.hits,
        acceptance.tries,
        uniforms is not None,
        out.q_probs if uniforms is None else uniforms,
        *out,
        buffer,
    )
    return tree_of(out, nodes, rows, has_cells=True), used


@kernel
def grow_places(
    own_keys: np.ndarray,
    own_counts: np.ndarray,
    own_stamps: np.ndarray,
    own_ids: np.ndarray,
    own_probs: np.ndarray,
    fallback_keys: np.ndarray,
    fallback_counts: np.ndarray,
    fallback_stamps: np.ndarray,
    fallback_ids: np.ndarray,
    fallback_probs: np.ndarray,
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
    buffer: np.ndarray,
) -> tuple[int, int, int]:
    """The kernel of `grow`; returns the numbers of nodes, proposals and uniforms used.

    The arguments are the fields of two Tables, a Temper, limits, acceptance counts and Buffers.
    """
    own = Table(own_keys, own_counts, own_stamps, own_ids, own_probs)
    fallback = Table(fallback_keys, fallback_counts, fallback_stamps, fallback_ids, fallback_probs)
    work = split_workspace(buffer, most, own_ids.shape[1], len(root))
    copy(root, work.contexts[0])
    return fill(
        own, fallback, lengths, clock, Temper(power, top_k, top_p, min_p), (most, deepest, least),
        (hits, tries), is_drawn, uniforms,
        Buffers(tokens, parents, laws, rows, starts, q_ids, q_probs, cells), work,
    )  # fmt: skip


@kernel
def fill(
    own: Table,
    fallback: Table,
    lengths: np.ndarray,
    clock: int,
    how: Temper,
    limits: tuple[int, int, float],
    acceptance: tuple[np.ndarray, np.ndarray],
    is_drawn: bool,
    uniforms: np.ndarray,
    out: Buffers,
    work: Workspace,
) -> tuple[int, int, int]:
    """`grow_places` below the first context of `work`."""
    (most, deepest, least), (hits, tries) = limits, acceptance
    contexts, states, order, left, value, ids, probs, hashes, ahead = work
    larger = own if len(own.keys) > len(fallback.keys) else fallback
    left[0], value[0] = 1.0, 0.0
    states[0] = 0
    nodes = rows = used = filled = new = 0
    while nodes < most:
        state = states[new]
        if state[DEPTH] < deepest:
            state[PLACE], level = find_longest(
                own.keys, fallback.keys, lengths, contexts[new], hashes
            )
            if state[PLACE]:
                state[SIZE] = write_q_at(own, fallback, state[PLACE], clock, how, ids, probs, 0)
            if state[SIZE]:
                state[GRADE] = grade(probs[0], level)
                value[new] = left[new] * rate(hits, tries, state[GRADE], 0)
        at = largest(value, nodes + 1)
        if value[at] <= least:
            break
        state = states[at]
        place, size, rank = state[PLACE], state[SIZE], state[RANK]
        if rank == 0 and is_drawn:
            write_q_at(own, fallback, place, clock, how, out.q_ids, out.q_probs, filled)
            draw(uniforms, used, out.q_probs[filled : filled + size], order[at, :size], probs)
            state[ROW], used, rows, filled = rows, used + size, rows + 1, filled + size
            out.starts[rows] = filled
        token = token_at(own, fallback, place, order[at, rank] if is_drawn else rank)
        write_node(out, nodes, token, at - 1, is_drawn, state[ROW])
        out.cells[nodes] = state[GRADE] * NUM_RANKS + min(rank, NUM_RANKS - 1)
        new = nodes = nodes + 1
        states[new] = 0
        left[new], value[new], states[new, DEPTH] = value[at], 0.0, state[DEPTH] + 1
        extend(contexts[at], token, contexts[new])
        state[RANK] = rank = rank + 1
        left[at] -= value[at]
        value[at] = 0.0
        if rank < size:
            value[at] = left[at] * rate(hits, tries, state[GRADE], rank)
            token = token_at(own, fallback, place, order[at, rank] if is_drawn else rank)
            extend(contexts[at], token, ahead)
            prefetch(larger, lengths, ahead, hashes)
    return nodes, rows, used


@kernel(inline="always")
def token_at(own: Table, fallback: Table, place: int, entry: int) -> int:
    """A token of the q at a place of `write_q_at`."""
    return own.ids[place - 1, entry] if place > 0 else fallback.ids[-1 - place, entry]


@kernel
def extend(context: np.ndarray, token: int, longer: np.ndarray) -> None:
    """Writes a context extended by a token."""
    copy(context[:-1], longer[1:])
    longer[0] = token


@kernel
def prefetch(table: Table, lengths: np.ndarray, context: np.ndarray, hashes: np.ndarray) -> None:
    """Prefetches the cache lines for a look-up of this context."""
    known = hash_context(context, hashes)
    for n in lengths:
        if n <= known:
            slot = home(hashes[n - 1], len(table.keys))
            fetch(table.keys, slot)
            fetch(table.counts, slot)  # the begin of the row
            fetch(table.probs, slot)


@kernel(inline="always")
def write_q_at(
    own: Table,
    fallback: Table,
    place: int,
    clock: int,
    how: Temper,
    ids: np.ndarray,
    probs: np.ndarray,
    at: int,
) -> int:
    """`write_q` of a place: slot + 1 in `own`, or -1 - slot in `fallback`."""
    if place > 0:
        return write_q(own, place - 1, clock, how, ids, probs, at)
    return write_q(fallback, -1 - place, clock, how, ids, probs, at)


@kernel(inline="always")
def rate(hits: np.ndarray, tries: np.ndarray, row: int, rank: int) -> float:
    """Acceptance rate of a child of this rank below a q of grade `row`."""
    cell = row, min(rank, NUM_RANKS - 1)
    return hits[cell] / tries[cell]


@kernel(inline="always")
def write_node(out: Buffers, node: int, token: int, parent: int, is_drawn: bool, row: int) -> None:
    """Writes a node; row: its proposal."""
    out.tokens[node], out.parents[node] = token, parent
    out.laws[node] = SWOR if is_drawn else POINT
    out.rows[node] = row if is_drawn else -1


@kernel(inline="always")
def largest(value: np.ndarray, count: int) -> int:
    """The index of the first largest value."""
    at = 0
    for i in range(1, count):
        at = i if value[i] > value[at] else at
    return at
