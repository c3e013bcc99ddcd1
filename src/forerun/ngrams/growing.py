"""One call per tree: the most promising places first, filled from a logit memory.

The fast form of the grower `dynamic` over `LogitMemory.lookup`: same nodes, same q, same uniforms
in the same order (tests compare them node by node).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from forerun.chances import RANKS, grade
from forerun.ngrams.drafting import Buffers, buffers, race, tree_of
from forerun.ngrams.kernels import Arrays, Table, Temper, look_up_into
from forerun.records import Plan
from forerun.tree import POINT, SWOR, Tree


def grow(
    table: Table,
    lengths: np.ndarray,
    clock: int,
    root: np.ndarray,
    plan: Plan,
    temper: Temper,
    rates: np.ndarray,
    uniforms: np.ndarray | None,
) -> tuple[Tree, int]:
    """A tree below the context `root`: at most plan.nodes nodes of chances above plan.least.

    With uniforms, children are drawn without replacement; without, they are the best tokens.
    Returns the tree, with its cells, and how many uniforms were used: one per entry of every q
    that has children.
    """
    entries = table.ids.shape[1]
    out = buffers(plan.nodes, entries)
    cells = np.empty(plan.nodes, np.int8)
    is_drawn = uniforms is not None
    given = out.q_probs if uniforms is None else uniforms
    limits = plan.nodes, plan.depth, max(0.0, plan.least)
    nodes, rows, used = grow_places(
        table[:], lengths, clock, temper[:], root, *limits, rates, is_drawn, given, out[:], cells
    )
    return tree_of(out, nodes, rows, cells), used


@njit(cache=True, nogil=True)
def grow_places(
    arrays: Arrays,
    lengths: np.ndarray,
    clock: int,
    temper: Arrays,
    root: np.ndarray,
    most: int,
    deepest: int,
    least: float,
    rates: np.ndarray,
    is_drawn: bool,
    uniforms: np.ndarray,
    room: Arrays,
    cells: np.ndarray,
) -> tuple[int, int, int]:
    """Best first, node i in row i + 1 of the arrays; returns nodes, proposals and uniforms used.

    arrays: a Table; temper: a Temper; room: Buffers.
    """
    table, how, out = Table(*arrays), Temper(*temper), Buffers(*room)
    longest, entries = len(root), table.ids.shape[1]
    contexts = np.empty((most + 1, longest), np.int32)
    contexts[0] = root
    depths, ranks = np.zeros(most + 1, np.int64), np.zeros(most + 1, np.int64)
    sizes, rows_of = np.zeros(most + 1, np.int64), np.full(most + 1, -1, np.int64)
    grades = np.zeros(most + 1, np.int64)
    left, value = np.zeros(most + 1), np.zeros(most + 1)  # see growers.dynamic
    q_ids, q_probs = np.empty((most + 1) * entries, np.int32), np.empty((most + 1) * entries)
    order, hashes = np.empty((most + 1, entries), np.int64), np.empty(longest, np.uint64)
    left[0] = 1.0
    nodes = rows = used = filled = new = 0
    while True:
        if depths[new] < deepest:
            context, start = contexts[new], new * entries
            sizes[new] = look_up_into(
                table, lengths, clock, context, how, hashes, q_ids, q_probs, start
            )
            if sizes[new]:
                grades[new] = grade(q_probs[start])
                value[new] = left[new] * rates[grades[new], 0]
        at = np.argmax(value[: nodes + 1])
        if nodes == most or value[at] <= least:
            return nodes, rows, used
        start, size, rank = at * entries, sizes[at], ranks[at]
        if rank == 0 and is_drawn:
            part = slice(start, start + size)
            race(uniforms, used, q_probs[part], order[at, :size])
            filled = keep_q(out, rows, filled, q_ids[part], q_probs[part])
            rows_of[at] = rows
            used, rows = used + size, rows + 1
        token = q_ids[start + (order[at, rank] if is_drawn else rank)]
        out.tokens[nodes], out.parents[nodes] = token, at - 1
        out.laws[nodes], out.rows[nodes] = SWOR if is_drawn else POINT, rows_of[at]
        cells[nodes] = grades[at] * RANKS + min(rank, RANKS - 1)
        new = nodes = nodes + 1
        left[new], depths[new] = value[at], depths[at] + 1
        contexts[new, 1:] = contexts[at, :-1]
        contexts[new, 0] = token
        ranks[at] += 1
        left[at] -= value[at]
        value[at] = left[at] * rates[grades[at], min(ranks[at], RANKS - 1)]
        if ranks[at] == size:
            value[at] = 0.0


@njit(cache=True, nogil=True, inline="always")
def keep_q(out: Buffers, row: int, start: int, ids: np.ndarray, probs: np.ndarray) -> int:
    """Writes a proposal from `start` on; returns where the next one begins."""
    stop = start + len(ids)
    out.q_ids[start:stop], out.q_probs[start:stop] = ids, probs
    out.starts[row + 1] = stop
    return stop
