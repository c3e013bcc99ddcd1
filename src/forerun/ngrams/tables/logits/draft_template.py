"""One call per tree: a template filled from a logit memory.

The fast form of the growers `gumbel` and `template` over `LogitMemory.lookup`: same nodes, same q,
same uniforms in the same order (tests compare them node by node).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from forerun.core.tree import EMPTY, POINT, SWOR, Tree
from forerun.core.tree_template import Shape
from forerun.ngrams.tables.logits.kernels import Arrays, Table, Temper, fill_context, look_up
from forerun.utils.jit import bare, copy


class Buffers(NamedTuple):
    """Room for a tree of N nodes with K entries per proposal."""

    tokens: np.ndarray  # int32 [N]
    parents: np.ndarray  # int32 [N]
    laws: np.ndarray  # int8 [N]
    rows: np.ndarray  # int32 [N]
    starts: np.ndarray  # int64 [N + 1]
    q_ids: np.ndarray  # int32 [(N + 1) * K]
    q_probs: np.ndarray  # float64 [(N + 1) * K]
    cells: np.ndarray  # int8 [N], where growers know them


TOLD = replace(EMPTY, cells=np.empty(0, np.int8))  # a tree without nodes, of which all is told
# Buffers of trees up to MOST_SPARE nodes are made TOGETHER: in code that a pass has made cold one
# costs as much as sixteen. Their sizes are multiples of SIZES. A kept tree keeps its neighbours.
TOGETHER, SIZES, MOST_SPARE = 16, 8, 64
_spare: dict[tuple[int, int], list[Buffers]] = {}  # by nodes and entries; nobody has had them


def draft(
    near: Table,
    far: Table,
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
    out = buffers(places, near.ids.shape[1])
    is_drawn = uniforms is not None
    nodes, rows, used = fill_places(
        (near[:], far[:]),
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
    """Room for a tree of `nodes` nodes or a few more, uninitialised; for any thread."""
    if nodes > MOST_SPARE:
        return _made(1, nodes, entries)[0]
    size = -(-nodes // SIZES) * SIZES
    spare = _spare.setdefault((size, entries), [])
    try:
        return spare.pop()
    except IndexError:
        first, *others = _made(TOGETHER, size, entries)
        spare += others
        return first


def _made(num: int, nodes: int, entries: int) -> list[Buffers]:
    """So many buffers, neighbours in memory."""
    many = (
        np.empty((num, nodes), np.int32),
        np.empty((num, nodes), np.int32),
        np.empty((num, nodes), np.int8),
        np.empty((num, nodes), np.int32),
        np.zeros((num, nodes + 1), np.int64),
        np.empty((num, (nodes + 1) * entries), np.int32),
        np.empty((num, (nodes + 1) * entries), np.float64),
        np.empty((num, nodes), np.int8),
    )
    return [Buffers(*rows) for rows in zip(*many, strict=True)]


def tree_of(out: Buffers, nodes: int, rows: int, *, has_cells: bool = False) -> Tree:
    """The first `nodes` nodes and `rows` proposals; buffers without any are spare again."""
    size = len(out.tokens)
    if not nodes:
        if size <= MOST_SPARE:
            _spare[size, len(out.q_ids) // (size + 1)].append(out)
        return TOLD if has_cells else EMPTY
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


class Recalled(NamedTuple):
    """A logit memory below a text, as `law_after` asks it, and room to work in."""

    near: Table
    far: Table
    lengths: np.ndarray  # int64, falling
    clock: int
    temper: Temper
    root: np.ndarray  # int32 [longest], the text's end, most recent token first
    context: np.ndarray  # int32 [longest]
    hashes: np.ndarray  # uint64 [longest]


class Desk(NamedTuple):
    """Room to walk in."""

    where: np.ndarray  # int32 [places + 1], place + 1 -> tree node
    order: np.ndarray  # int64 [places], of entries of a q
    keys: np.ndarray  # float64 [entries], what they are ordered by


@njit(cache=True, nogil=True)
def desk(places: int, entries: int) -> Desk:
    """Room for so many places, and proposals of so many entries."""
    return Desk(np.empty(places + 1, np.int32), np.empty(places, np.int64), np.empty(entries))


@njit(cache=True, nogil=True)
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
    room: Arrays,
) -> tuple[int, int, int]:
    """`walk` through a logit memory. arrays: two Tables; temper: a Temper; room: Buffers."""
    longest = len(root)
    context, hashes = np.empty(longest, np.int32), np.empty(longest, np.uint64)
    near, far = Table(*arrays[0]), Table(*arrays[1])
    memory = Recalled(near, far, lengths, clock, Temper(*temper), root, context, hashes)
    work = desk(len(places[0]), near.ids.shape[1])
    return fill(memory, places, depth, is_drawn, uniforms, Buffers(*room), work)


@bare
def fill(
    memory: Recalled,
    places: Arrays,
    depth: int,
    is_drawn: bool,
    uniforms: np.ndarray,
    out: Buffers,
    work: Desk,
) -> tuple[int, int, int]:
    """`fill_places` with room to work in."""
    return walk(law_after, memory, places, depth, is_drawn, uniforms, out, work)


@bare
def law_after(memory: Recalled, node: int, out: Buffers, filled: int) -> int:
    """Writes q below a node, from entry `filled` on; returns its size, 0 if nothing is known."""
    fill_context(memory.root, out.tokens, out.parents, node, memory.context)
    size, _ = look_up(
        memory.near, memory.far, memory.lengths, memory.clock, memory.context, memory.temper,
        memory.hashes, out.q_ids, out.q_probs, filled,
    )  # fmt: skip
    return size


@bare(inline="always")  # so that `law` is known where it is compiled
def walk(
    law: Any,
    source: Any,
    template: Arrays,
    depth: int,
    is_drawn: bool,
    uniforms: np.ndarray,
    out: Buffers,
    work: Desk,
) -> tuple[int, int, int]:
    """Fills places level by level; returns the numbers of nodes, proposals and uniforms used.

    law(source, node, out, filled): a kernel that writes q after a node's path. A place without q
    gets no children, one with few entries gets fewer: both depend on the parent's path alone, never
    on the tokens drawn for the children. template: depths, widths, firsts of a Shape.
    """
    depths, widths, firsts = template
    places, (where, order, keys) = len(depths), work
    where[:] = -2  # nowhere
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
            run(uniforms, used, q, order[:count], keys)
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


@bare
def run(
    uniforms: np.ndarray, used: int, q: np.ndarray, order: np.ndarray, arrivals: np.ndarray
) -> None:
    """The first len(order) arrivals of -log(u) / q: sequential draws without replacement."""
    for j in range(len(q)):
        arrivals[j] = -math.log1p(-uniforms[used + j]) / q[j]
    for rank in range(len(order)):
        first = 0
        for j in range(1, len(q)):
            if arrivals[j] < arrivals[first]:
                first = j
        order[rank] = first
        arrivals[first] = np.inf


@bare
def best(q: np.ndarray, order: np.ndarray, left: np.ndarray) -> None:
    """The len(order) largest entries of q, ties by place; left [>= len(q)]: room to work in."""
    copy(q, left)
    for rank in range(len(order)):
        first = 0
        for j in range(1, len(q)):
            if left[j] > left[first]:
                first = j
        order[rank] = first
        left[first] = -1.0
