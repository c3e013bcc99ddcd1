"""Kernels of a counted suffix tree: append tokens, remove the oldest text.

The tree has every string of at most D tokens that occurs in its texts, with its count. A growing
text has a pointer for each of its last D suffixes: the node at the suffix's end. A new token moves
every pointer by one token and updates the counts. END of a node is a position in the youngest text
with its path, so the oldest text can be removed without a search for other occurrences.
"""

from __future__ import annotations

import numpy as np

from forerun.ngrams.tables.suffix.hash_maps import (
    BIRTH,
    NONE,
    PAGE,
    TOKEN,
    Texts,
    back,
    erase,
    gather,
    num_free,
    release,
    slot_of,
    token_at,
    write,
)
from forerun.ngrams.tables.suffix.hash_maps import LENGTH as SIZE
from forerun.ngrams.tables.suffix.nodes import (
    COUNT,
    END,
    FIRST,
    HEAD,
    LENGTH,
    NEXT,
    PREV,
    ROOT,
    RUN,
    Nodes,
    adopt,
    attach,
    child_of,
    decrement,
    detach,
    increment,
    leave_run,
    new_node,
    replace,
)
from forerun.utils.jit import compiled, fetch, kernel


@kernel
def append(
    nodes: np.ndarray,
    runs: np.ndarray,
    slots: np.ndarray,
    node_pool: np.ndarray,
    run_pool: np.ndarray,
    pages: np.ndarray,
    links: np.ndarray,
    pool: np.ndarray,
    state: np.ndarray,
    pointers: np.ndarray,
    birth: int,
    new: np.ndarray,
    scratch: np.ndarray,
) -> int:
    """Appends tokens to a text until the arrays are full; returns their number.

    nodes to run_pool: fields of Nodes; pages, links, pool: fields of Texts; pointers: int32 [D];
    scratch: int32 [D].
    """
    texts, depth = Texts(pages, links, pool), len(pointers)
    tree = Nodes(nodes, runs, slots, node_pool, run_pool, texts)
    for done in range(len(new)):
        is_full = num_free(tree.texts.pool, len(tree.texts.links)) == 0
        if num_free(tree.node_pool, len(tree.nodes)) < depth or (
            is_full and state[SIZE] % PAGE == 0
        ):
            return done
        start = state[SIZE]
        position = write(tree.texts, state, birth, new[done])
        pointers[start % depth] = ROOT
        tree.nodes[ROOT, COUNT] += 1
        fetch_children(tree, pointers, start, new[done], scratch)
        advance(tree, pointers[: start + 1], new[done], position)
    return len(new)


@kernel
def fetch_children(
    tree: Nodes, pointers: np.ndarray, start: int, token: int, found: np.ndarray
) -> None:
    """Prefetches the cache lines for `descend`, step by step for all pointers.

    Each step reads the lines of the step before. start: of the shortest suffix; found: int32 [D],
    scratch.
    """
    nodes, runs, slots, count = tree.nodes, tree.runs, tree.slots, 0
    run_of = nodes[:, RUN]
    for at in range(start, max(-1, start - len(pointers)), -1):
        node = pointers[at % len(pointers)]
        head = nodes[node, HEAD]
        if head == NONE:  # longer suffixes have no children either
            break
        if nodes[head, NEXT] != NONE:  # an only child is not mapped
            found[count] = slot_of(node, token, len(slots))
            fetch(slots, found[count])
            count += 1
    for i in range(count):
        found[i] = max(slots[found[i]], ROOT)  # ROOT if there is no child
        fetch(nodes, found[i])
        fetch(run_of, found[i])
    for i in range(count):
        fetch(runs, run_of[found[i]])
    for i in range(count):
        found[i] = runs[run_of[found[i]], FIRST]
        fetch(nodes, found[i])
    for i in range(count):
        fetch(nodes, nodes[found[i], PREV])


@kernel
def advance(tree: Nodes, pointers: np.ndarray, token: int, position: int) -> None:
    """Moves all pointers by one token."""
    nodes, texts = tree.nodes, tree.texts
    for i in range(len(pointers)):
        node = pointers[i]
        row, child = nodes[node], nodes[node, HEAD]
        if node == ROOT:
            pointers[i] = descend(tree, node, token, position)
        elif child == NONE and row[COUNT] == 1:  # a leaf of this suffix only
            row[LENGTH] += 1
            row[END] = position
        elif child == NONE or nodes[child, COUNT] != row[COUNT] - 1 or nodes[child, TOKEN] != token:
            pointers[i] = descend(tree, node, token, position)
        elif nodes[child, LENGTH] == 1:  # all suffixes through `node` continue to its child
            nodes[child, COUNT] += 1
            nodes[child, END] = younger(texts, nodes[child, END], position)
            merge(tree, node, child)
            pointers[i] = child
        else:  # the same, with a longer edge: move the border between the two by a token
            nodes[child, LENGTH] -= 1
            row[LENGTH] += 1
            row[END] = younger(
                texts, back(texts, nodes[child, END], nodes[child, LENGTH]), position
            )
            nodes[child, TOKEN] = first_token(texts, nodes, child)


@kernel
def descend(tree: Nodes, node: int, token: int, position: int) -> int:
    """The node one token below `node`, created if missing; its count is incremented."""
    child = child_of(tree, node, token)
    if child == NONE:
        child = new_node(tree, token, 1, 1, position)
        attach(tree, node, child)
        return child
    if tree.nodes[child, LENGTH] > 1:
        child = split(tree, child)
    increment(tree, child)
    tree.nodes[child, END] = younger(tree.texts, tree.nodes[child, END], position)
    return child


@kernel
def younger(texts: Texts, old: int, new: int) -> int:
    """The one of two end positions that is in the younger text; ties: `new`."""
    births = texts.links[:, BIRTH]
    return new if births[new // PAGE] >= births[old // PAGE] else old


@kernel
def first_token(texts: Texts, nodes: np.ndarray, node: int) -> int:
    """The first token of the edge to a node, read from its text."""
    return token_at(texts, back(texts, nodes[node, END], nodes[node, LENGTH] - 1))


@kernel
def merge(tree: Nodes, node: int, child: int) -> None:
    """Merges a node into its only child of equal count."""
    nodes = tree.nodes
    leave_run(tree, child)
    nodes[child, TOKEN] = nodes[node, TOKEN]
    nodes[child, LENGTH] += nodes[node, LENGTH]
    replace(tree, node, child)
    release(tree.node_pool, nodes, NEXT, node)


@kernel
def split(tree: Nodes, node: int) -> int:
    """Splits the edge to `node` after its first token; returns the new node there."""
    nodes = tree.nodes
    rest = nodes[node, LENGTH] - 1
    end = back(tree.texts, nodes[node, END], rest)
    upper = new_node(tree, nodes[node, TOKEN], nodes[node, COUNT], 1, end)
    replace(tree, node, upper)
    nodes[node, LENGTH] = rest
    nodes[node, TOKEN] = first_token(tree.texts, nodes, node)
    adopt(tree, upper, node)
    return upper


@compiled
def remove(tree: Nodes, state: np.ndarray, depth: int) -> None:
    """Removes the oldest text: its suffixes and its pages."""
    text = gather(tree.texts, state)
    for start in range(len(text)):
        remove_suffix(tree, text[start : start + depth])
    erase(tree.texts, state)


@kernel
def remove_suffix(tree: Nodes, suffix: np.ndarray) -> None:
    """Decrements the count of every prefix of a suffix."""
    nodes, node, at = tree.nodes, ROOT, 0
    nodes[ROOT, COUNT] -= 1
    while at < len(suffix):
        child = child_of(tree, node, suffix[at])
        at += nodes[child, LENGTH]
        if nodes[child, COUNT] == 1:
            detach(tree, child)
            child = NONE
        else:
            decrement(tree, child)
        merge_only_child(tree, node)
        if child == NONE:
            return
        node = child
    merge_only_child(tree, node)


@kernel
def merge_only_child(tree: Nodes, node: int) -> None:
    """Merges a node with its only child if their counts are equal."""
    child = tree.nodes[node, HEAD]
    if node != ROOT and child != NONE and tree.nodes[child, COUNT] == tree.nodes[node, COUNT]:
        merge(tree, node, child)
