"""Fills a template from a logit memory, in one call per tree.

The compiled form of the growers `gumbel` and `template` over `LogitMemory.lookup`: same nodes, same
q, same uniforms in the same order (tests compare them).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from forerun.core.tree import EMPTY, POINT, SWOR, Tree
from forerun.core.tree_template import Shape
from forerun.ngrams.tables.logits.kernels import Arrays, Table, Temper, fill_context, look_up
from forerun.utils.jit import compiled, copy, kernel


class Buffers(NamedTuple):
    """Arrays of a tree with N nodes and K entries per proposal."""

    tokens: np.ndarray  # int32 [N]
    parents: np.ndarray  # int32 [N]
    laws: np.ndarray  # int8 [N]
    rows: np.ndarray  # int32 [N]
    starts: np.ndarray  # int64 [N + 1]
    q_ids: np.ndarray  # int32 [(N + 1) * K]
    q_probs: np.ndarray  # float64 [(N + 1) * K]
    cells: np.ndarray  # int8 [N], see `Tree.cells`


EMPTY_WITH_CELLS = replace(EMPTY, cells=np.empty(0, np.int8))


def draft(
    own: Table,
    fallback: Table,
    lengths: np.ndarray,
    clock: int,
    root: np.ndarray,
    shape: Shape,
    depth: int,
    temper: Temper,
    uniforms: np.ndarray | None,
) -> tuple[Tree, int]:
    """A tree below the context `root` with the first places of a template, down to `depth`.

    With uniforms, children are drawn without replacement; without, they are the most likely tokens.
    Returns the tree and the number of uniforms used: one per entry of every q.
    """
    places = len(shape.parents)
    out = buffers(places, own.ids.shape[1])
    is_drawn = uniforms is not None
    nodes, rows, used = fill_places(
        (own[:], fallback[:]),
        lengths,
        clock,
        temper[:],
        root,
        (shape.depths, shape.widths, shape.firsts),
        depth,
        is_drawn,
        out.q_probs if uniforms is None else uniforms,
        out[:],
    )
    return tree_of(out, nodes, rows), used


def buffers(nodes: int, entries: int) -> Buffers:
    """Uninitialised buffers for a tree; `starts` is zero."""
    return Buffers(
        np.empty(nodes, np.int32),
        np.empty(nodes, np.int32),
        np.empty(nodes, np.int8),
        np.empty(nodes, np.int32),
        np.zeros(nodes + 1, np.int64),
        np.empty((nodes + 1) * entries, np.int32),
        np.empty((nodes + 1) * entries, np.float64),
        np.empty(nodes, np.int8),
    )


def tree_of(out: Buffers, nodes: int, rows: int, *, has_cells: bool = False) -> Tree:
    """The tree of the first `nodes` nodes and `rows` proposals."""
    if not nodes:
        return EMPTY_WITH_CELLS if has_cells else EMPTY
    filled = out.starts.item(rows)
    return Tree(
        tokens=out.tokens[:nodes],
        parents=out.parents[:nodes],
        laws=out.laws[:nodes],
        rows=out.rows[:nodes],
        starts=out.starts[: rows + 1],
        q_ids=out.q_ids[:filled],
        q_probs=out.q_probs[:filled],
        cells=out.cells[:nodes] if has_cells else None,
    )


class MemorySource(NamedTuple):
    """The source of `law_after`: a logit memory and a text, with scratch arrays."""

    own: Table
    fallback: Table
    lengths: np.ndarray  # int64, falling
    clock: int
    temper: Temper
    root: np.ndarray  # int32 [longest], the text's end, most recent token first
    context: np.ndarray  # int32 [longest], scratch
    hashes: np.ndarray  # uint64 [longest], scratch


class Workspace(NamedTuple):
    """Scratch arrays of `walk`."""

    where: np.ndarray  # int32 [places + 1], place + 1 -> tree node
    order: np.ndarray  # int64 [places], order of the entries of a q
    keys: np.ndarray  # float64 [entries], sort keys


@compiled
def new_workspace(places: int, entries: int) -> Workspace:
    """A workspace for `places` places and proposals of `entries` entries."""
    return Workspace(np.empty(places + 1, np.int32), np.empty(places, np.int64), np.empty(entries))


@compiled
def fill_places(
    arrays: tuple[Arrays, Arrays],
    lengths: np.ndarray,
    clock: int,
    temper: Arrays,
    root: np.ndarray,
    places: Arrays,
    depth: int,
    is_drawn: bool,
    uniforms: np.ndarray,
    buffer: Arrays,
) -> tuple[int, int, int]:
    """`walk` with a logit memory as source.

    arrays, temper, buffer: fields of two Tables, a Temper, Buffers.
    """
    longest = len(root)
    context, hashes = np.empty(longest, np.int32), np.empty(longest, np.uint64)
    own, fallback = Table(*arrays[0]), Table(*arrays[1])
    memory = MemorySource(own, fallback, lengths, clock, Temper(*temper), root, context, hashes)
    work = new_workspace(len(places[0]), own.ids.shape[1])
    return fill(memory, places, depth, is_drawn, uniforms, Buffers(*buffer), work)


@kernel
def fill(
    memory: MemorySource,
    places: Arrays,
    depth: int,
    is_drawn: bool,
    uniforms: np.ndarray,
    out: Buffers,
    work: Workspace,
) -> tuple[int, int, int]:
    """`fill_places` with a given workspace."""
    return walk(law_after, memory, places, depth, is_drawn, uniforms, out, work)


@kernel
def law_after(memory: MemorySource, node: int, out: Buffers, filled: int) -> int:
    """Writes q below a node, from entry `filled`; returns its size, 0 if no context is known."""
    fill_context(memory.root, out.tokens, out.parents, node, memory.context)
    size, _ = look_up(
        memory.own, memory.fallback, memory.lengths, memory.clock, memory.context, memory.temper,
        memory.hashes, out.q_ids, out.q_probs, filled,
    )  # fmt: skip
    return size


@kernel(inline="always")  # `law` must be a compile-time constant
def walk(
    law: Any,
    source: Any,
    template: Arrays,
    depth: int,
    is_drawn: bool,
    uniforms: np.ndarray,
    out: Buffers,
    work: Workspace,
) -> tuple[int, int, int]:
    """Fills places level by level; returns the numbers of nodes, proposals and uniforms used.

    law(source, node, out, filled): a kernel that writes q below a node. A place without q has no
    children; a q with few entries has fewer. Both depend on the parent's path only, never on the
    tokens drawn for the children. template: depths, widths, firsts of a Shape.
    """
    depths, widths, firsts = template
    places, (where, order, keys) = len(depths), work
    where[:] = -2  # empty place
    where[0] = -1
    nodes = rows = used = filled = 0
    for place in range(-1, places):
        node = where[place + 1]
        if node == -2 or widths[place] == 0:
            continue
        if place >= 0 and depths[place] >= depth:
            break
        size = law(source, node, out, filled)
        if not size:
            continue
        count = min(widths[place], size)
        q = out.q_probs[filled : filled + size]
        if is_drawn:
            draw(uniforms, used, q, order[:count], keys)
            used += size
        else:
            best(q, order[:count], keys)
        for rank in range(count):
            out.tokens[nodes], out.parents[nodes] = out.q_ids[filled + order[rank]], node
            out.laws[nodes] = SWOR if is_drawn else POINT
            out.rows[nodes] = rows if is_drawn else -1
            where[firsts[place] + rank + 1] = nodes
            nodes += 1
        if is_drawn:  # keep the proposal; otherwise the next one overwrites it
            filled += size
            rows += 1
            out.starts[rows] = filled
    return nodes, rows, used


@kernel
def draw(
    uniforms: np.ndarray, used: int, q: np.ndarray, order: np.ndarray, arrivals: np.ndarray
) -> None:
    """The indices of the smallest -log(u) / q: sequential draws without replacement."""
    for j in range(len(q)):
        arrivals[j] = -math.log1p(-uniforms[used + j]) / q[j]
    for rank in range(len(order)):
        first = 0
        for j in range(1, len(q)):
            if arrivals[j] < arrivals[first]:
                first = j
        order[rank] = first
        arrivals[first] = np.inf


@kernel
def best(q: np.ndarray, order: np.ndarray, left: np.ndarray) -> None:
    """The indices of the largest entries of q, ties: lowest index; left [>= len(q)]: scratch."""
    copy(q, left)
    for rank in range(len(order)):
        first = 0
        for j in range(1, len(q)):
            if left[j] > left[first]:
                first = j
        order[rank] = first
        left[first] = -1.0
