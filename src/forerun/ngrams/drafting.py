"""One call per tree: a template filled from a logit memory.

The fast form of the growers `gumbel` and `template` over `LogitMemory.lookup`: same nodes, same q,
same uniforms in the same order (tests compare them node by node).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from forerun.ngrams.kernels import Arrays, Table, Temper, look_up_into
from forerun.template import Shape
from forerun.tree import POINT, SWOR, Tree


class Buffers(NamedTuple):
    """Room for a tree of N nodes with K entries per proposal."""

    tokens: np.ndarray  # int32 [N]
    parents: np.ndarray  # int32 [N]
    laws: np.ndarray  # int8 [N]
    rows: np.ndarray  # int32 [N]
    starts: np.ndarray  # int64 [N + 1]
    q_ids: np.ndarray  # int32 [N * K]
    q_probs: np.ndarray  # float64 [N * K]


def draft(
    table: Table,
    lengths: np.ndarray,
    clock: int,
    root: np.ndarray,
    shape: Shape,
    depth: int,
    temper: Temper,
    uniforms: np.ndarray | None,
) -> tuple[Tree, int]:
    """The first places of a template, down to `depth`, filled below the context `root`.

    With uniforms, children are drawn without replacement; without, they are the best tokens.
    Returns the tree and how many uniforms it used: one per entry of every q.
    """
    places = len(shape.parents)
    out = buffers(places, table.ids.shape[1])
    is_drawn = uniforms is not None
    nodes, rows, used = fill_places(
        table[:],
        lengths,
        clock,
        temper,
        root,
        shape.depths,
        shape.widths,
        shape.firsts,
        depth,
        is_drawn,
        out.q_probs if uniforms is None else uniforms,
        out[:],
    )
    return tree_of(out, nodes, rows), used


def buffers(nodes: int, entries: int) -> Buffers:
    """Room for a tree of `nodes` nodes, uninitialised."""
    return Buffers(
        np.empty(nodes, np.int32),
        np.empty(nodes, np.int32),
        np.empty(nodes, np.int8),
        np.empty(nodes, np.int32),
        np.zeros(nodes + 1, np.int64),
        np.empty((nodes + 1) * entries, np.int32),
        np.empty((nodes + 1) * entries, np.float64),
    )


def tree_of(out: Buffers, nodes: int, rows: int, cells: np.ndarray | None = None) -> Tree:
    """The first `nodes` nodes and `rows` proposals; cells: of the chances, as `Tree` has them."""
    return Tree(
        tokens=out.tokens[:nodes],
        parents=out.parents[:nodes],
        laws=out.laws[:nodes],
        rows=out.rows[:nodes],
        starts=out.starts[: rows + 1],
        q_ids=out.q_ids[: out.starts[rows]],
        q_probs=out.q_probs[: out.starts[rows]],
        cells=None if cells is None else cells[:nodes],
    )


@njit(cache=True, nogil=True)
def fill_places(
    arrays: Arrays,
    lengths: np.ndarray,
    clock: int,
    temper: Temper,
    root: np.ndarray,
    depths: np.ndarray,
    widths: np.ndarray,
    firsts: np.ndarray,
    depth: int,
    is_drawn: bool,
    uniforms: np.ndarray,
    room: Arrays,
) -> tuple[int, int, int]:
    """Walks the places level by level; returns the numbers of nodes, proposals and uniforms used.

    A place whose context is unknown gets no children, one with few entries gets fewer: both depend
    on the parent's path alone, never on the tokens drawn for the children. arrays: a Table;
    room: Buffers.
    """
    table, out = Table(*arrays), Buffers(*room)
    places, longest = len(depths), len(root)
    contexts = np.empty((places + 1, longest), np.int32)  # of tree nodes; row 0 is the root's
    contexts[0] = root
    where = np.full(places + 1, -2, np.int32)  # place + 1 -> tree node
    where[0] = -1
    hashes = np.empty(longest, np.uint64)
    order = np.empty(table.ids.shape[1], np.int64)
    nodes = rows = used = filled = 0
    for place in range(-1, places):
        node = where[place + 1]
        if node == -2 or widths[place] == 0:
            continue
        if place >= 0 and depths[place] >= depth:
            break
        context = contexts[node + 1]
        size = look_up_into(
            table, lengths, clock, context, temper, hashes, out.q_ids, out.q_probs, filled
        )
        if not size:
            continue
        count = min(widths[place], size)
        if is_drawn:
            race(uniforms, used, out.q_probs[filled : filled + size], order[:count])
            used += size
        for rank in range(count):
            token = out.q_ids[filled + (order[rank] if is_drawn else rank)]
            out.tokens[nodes], out.parents[nodes] = token, node
            out.laws[nodes] = SWOR if is_drawn else POINT
            out.rows[nodes] = rows if is_drawn else -1
            where[firsts[place] + rank + 1] = nodes
            nodes += 1
            contexts[nodes, 1:] = contexts[node + 1, :-1]
            contexts[nodes, 0] = token
        if is_drawn:  # keep the proposal; otherwise the next one overwrites it
            filled += size
            rows += 1
            out.starts[rows] = filled
    return nodes, rows, used


@njit(cache=True, nogil=True)
def race(uniforms: np.ndarray, used: int, q: np.ndarray, order: np.ndarray) -> None:
    """The first len(order) arrivals of -log(u) / q: sequential draws without replacement."""
    arrivals = np.empty(len(q))
    for j in range(len(q)):
        arrivals[j] = -math.log1p(-uniforms[used + j]) / q[j]
    for rank in range(len(order)):
        first = 0
        for j in range(1, len(q)):
            if arrivals[j] < arrivals[first]:
                first = j
        order[rank] = first
        arrivals[first] = np.inf
