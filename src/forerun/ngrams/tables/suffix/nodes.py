"""Nodes of a counted suffix tree: children by token, and sorted by count.

Siblings form a linked list of falling counts. Siblings of equal count form a run, and every node
stores its run. A count therefore changes by one in O(1): the node moves to the border of its run.
The hash map has only children with siblings; an only child is its parent's HEAD.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.ngrams.tables.suffix.hash_maps import (
    NONE,
    OWNER,
    TOKEN,
    Texts,
    drop,
    enlarged,
    find,
    new_pool,
    new_texts,
    put,
    release,
    slot_with,
    take,
)
from forerun.utils.jit import kernel

# Columns of `nodes`; OWNER is the parent, TOKEN the first token of the edge from it.
HEAD, NEXT, PREV, COUNT, LENGTH, END, RUN = 2, 3, 4, 5, 6, 7, 8
COLUMNS = 9
FIRST, FINAL = 0, 1  # columns of `runs`
ROOT = 0
NODE_BYTES = 4 * (COLUMNS + 2) + 5  # a row, a run, 1.25 slots


class Nodes(NamedTuple):
    """N nodes. PREV of a first child is the last child; END is an end position of the path."""

    nodes: np.ndarray  # int32 [N, 9]
    runs: np.ndarray  # int32 [N, 2]: first and last sibling of equal count
    slots: np.ndarray  # int32 [1.25 N]: hash map of children
    node_pool: np.ndarray
    run_pool: np.ndarray
    texts: Texts


def new_nodes(count: int, pages: int) -> Nodes:
    """A tree with only the root."""
    tree = Nodes(
        np.zeros((count, COLUMNS), np.int32),
        np.zeros((count, 2), np.int32),
        np.full(count + count // 4, NONE, np.int32),
        new_pool(),
        new_pool(),
        new_texts(pages),
    )
    root = take(tree.node_pool, tree.nodes, NEXT)
    tree.nodes[root, [OWNER, HEAD, NEXT]] = NONE
    return tree


def with_nodes(old: Nodes, count: int) -> Nodes:
    """The tree in larger arrays."""
    tree = old._replace(
        nodes=enlarged(old.nodes, count),
        runs=enlarged(old.runs, count),
        slots=np.full(count + count // 4, NONE, np.int32),
    )
    rehash(old.slots, tree)
    return tree


@kernel
def rehash(old: np.ndarray, tree: Nodes) -> None:
    """Maps all children of the old slots in the new slots."""
    for row in old:
        if row != NONE:
            put(tree.slots, tree.nodes, row)


@kernel
def child_of(tree: Nodes, node: int, token: int) -> int:
    """The child with an edge that begins with `token`, or -1."""
    head = tree.nodes[node, HEAD]
    if head == NONE or tree.nodes[head, TOKEN] == token:
        return head
    if tree.nodes[head, NEXT] == NONE:
        return NONE
    return find(tree.slots, tree.nodes, node, token)


@kernel
def new_node(tree: Nodes, token: int, count: int, length: int, end: int) -> int:
    """A node without parent."""
    node = take(tree.node_pool, tree.nodes, NEXT)
    row = tree.nodes[node]
    row[OWNER], row[TOKEN], row[HEAD], row[NEXT], row[PREV] = NONE, token, NONE, NONE, NONE
    row[COUNT], row[LENGTH], row[END], row[RUN] = count, length, end, NONE
    return node


@kernel
def previous_sibling(tree: Nodes, node: int) -> int:
    """The previous sibling, or -1."""
    is_first = tree.nodes[tree.nodes[node, OWNER], HEAD] == node
    return NONE if is_first else tree.nodes[node, PREV]


@kernel
def link(tree: Nodes, node: int, after: int) -> None:
    """Inserts a node into its parent's list after `after`, or at the front."""
    nodes, parent = tree.nodes, tree.nodes[node, OWNER]
    head = nodes[parent, HEAD]
    following = head if after == NONE else nodes[after, NEXT]
    nodes[node, NEXT] = following
    if after == NONE:
        nodes[parent, HEAD] = node
        nodes[node, PREV] = node if head == NONE else nodes[head, PREV]
    else:
        nodes[after, NEXT] = node
        nodes[node, PREV] = after
    last = nodes[parent, HEAD] if following == NONE else following
    nodes[last, PREV] = node


@kernel
def unlink(tree: Nodes, node: int) -> None:
    """Removes a node from its parent's list."""
    nodes, parent = tree.nodes, tree.nodes[node, OWNER]
    before, following = nodes[node, PREV], nodes[node, NEXT]
    if nodes[parent, HEAD] == node:
        nodes[parent, HEAD] = following
    else:
        nodes[before, NEXT] = following
    last = nodes[parent, HEAD] if following == NONE else following
    if last != NONE:
        nodes[last, PREV] = before


@kernel
def begin_run(tree: Nodes, node: int) -> None:
    """Makes a node a new run."""
    run = take(tree.run_pool, tree.runs, FIRST)
    tree.runs[run, FIRST] = tree.runs[run, FINAL] = node
    tree.nodes[node, RUN] = run


@kernel
def leave_run(tree: Nodes, node: int) -> None:
    """Removes a node from its run; it must still be in its list."""
    run = tree.nodes[node, RUN]
    if tree.runs[run, FIRST] == tree.runs[run, FINAL]:
        release(tree.run_pool, tree.runs, FIRST, run)
    elif tree.runs[run, FIRST] == node:
        tree.runs[run, FIRST] = tree.nodes[node, NEXT]
    elif tree.runs[run, FINAL] == node:
        tree.runs[run, FINAL] = tree.nodes[node, PREV]


@kernel
def prepend_to_run(tree: Nodes, node: int, run: int) -> None:
    """Inserts a node into the list as the first of a run."""
    first = tree.runs[run, FIRST]
    link(tree, node, previous_sibling(tree, first))
    tree.runs[run, FIRST] = node
    tree.nodes[node, RUN] = run


@kernel
def increment(tree: Nodes, node: int) -> None:
    """Increments a count; the node becomes the first of its new count."""
    nodes, run = tree.nodes, tree.nodes[node, RUN]
    count, first = nodes[node, COUNT] + 1, tree.runs[run, FIRST]
    above = previous_sibling(tree, first)
    joins = above != NONE and nodes[above, COUNT] == count
    nodes[node, COUNT] = count
    if first == tree.runs[run, FINAL] and not joins:
        return
    leave_run(tree, node)
    unlink(tree, node)
    if joins:
        prepend_to_run(tree, node, nodes[above, RUN])
    else:
        link(tree, node, above)
        begin_run(tree, node)


@kernel
def decrement(tree: Nodes, node: int) -> None:
    """Decrements a count, to at least 1; the node becomes the first of its new count."""
    nodes, run = tree.nodes, tree.nodes[node, RUN]
    count, final = nodes[node, COUNT] - 1, tree.runs[run, FINAL]
    below = nodes[final, NEXT]
    above = final if final != node else previous_sibling(tree, node)
    nodes[node, COUNT] = count
    leave_run(tree, node)
    unlink(tree, node)
    link(tree, node, above)
    if below != NONE and nodes[below, COUNT] == count:
        nodes[node, RUN] = nodes[below, RUN]
        tree.runs[nodes[below, RUN], FIRST] = node
    else:
        begin_run(tree, node)


@kernel
def attach(tree: Nodes, parent: int, node: int) -> None:
    """Adds a child with count 1, as the first of that count."""
    nodes, head = tree.nodes, tree.nodes[parent, HEAD]
    nodes[node, OWNER] = parent
    if head != NONE:
        if nodes[head, NEXT] == NONE:
            put(tree.slots, nodes, head)
        put(tree.slots, nodes, node)
    final = NONE if head == NONE else nodes[head, PREV]
    if final != NONE and nodes[final, COUNT] == nodes[node, COUNT]:
        prepend_to_run(tree, node, nodes[final, RUN])
    else:
        link(tree, node, final)
        begin_run(tree, node)


@kernel
def detach(tree: Nodes, node: int) -> None:
    """Removes a node without children from its parent and frees it."""
    nodes, parent = tree.nodes, tree.nodes[node, OWNER]
    head = nodes[parent, HEAD]
    if nodes[head, NEXT] != NONE:
        drop(tree.slots, nodes, node)
    leave_run(tree, node)
    unlink(tree, node)
    head = nodes[parent, HEAD]
    if head != NONE and nodes[head, NEXT] == NONE:
        drop(tree.slots, nodes, head)
    release(tree.node_pool, nodes, NEXT, node)


@kernel
def replace(tree: Nodes, old: int, new: int) -> None:
    """Replaces `old` by `new`, with equal first token and count, among its siblings."""
    nodes, parent, run = tree.nodes, tree.nodes[old, OWNER], tree.nodes[old, RUN]
    is_mapped = nodes[nodes[parent, HEAD], NEXT] != NONE
    if is_mapped:
        tree.slots[slot_with(tree.slots, nodes, old, old)] = new
    before = previous_sibling(tree, old)
    nodes[new, OWNER], nodes[new, RUN] = parent, run
    unlink(tree, old)
    link(tree, new, before)
    for side in (FIRST, FINAL):
        if tree.runs[run, side] == old:
            tree.runs[run, side] = new


@kernel
def adopt(tree: Nodes, parent: int, child: int) -> None:
    """Makes `child` the only child of a node without children."""
    tree.nodes[child, OWNER] = parent
    link(tree, child, NONE)
    begin_run(tree, child)
