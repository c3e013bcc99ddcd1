"""Kernels of a counted suffix tree: texts grow, the oldest go, drafts are read off.

The tree holds every string of at most D tokens that occurs in its texts, with the number of its
occurrences. A text that grows has a pointer for each of its last D suffixes: the node where that
suffix ends. A new token moves every pointer by one token, which is all the counting there is. END
of a node lies in the youngest text that holds its path, so the oldest text can be removed without
looking for other occurrences.
"""

from __future__ import annotations

import numpy as np
from numba import njit

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
from forerun.utils.jit import bare, fetch


@bare
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
    room: np.ndarray,
) -> int:
    """Appends tokens to a text until room runs out; returns how many.

    nodes to run_pool: of Nodes; pages, links, pool: its Texts; pointers: int32 [D]; room: as
    much again, to work in.
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
        fetch_children(tree, pointers, start, new[done], room)
        advance(tree, pointers[: start + 1], new[done], position)
    return len(new)


@bare
def fetch_children(
    tree: Nodes, pointers: np.ndarray, start: int, token: int, found: np.ndarray
) -> None:
    """Asks memory for what `descend` will touch, one step for all pointers before the next.

    Each step reads what the one before has asked for. start: of the shortest suffix; found: int32
    [D], room to work in.
    """
    nodes, runs, slots, count = tree.nodes, tree.runs, tree.slots, 0
    run_of = nodes[:, RUN]
    for at in range(start, max(-1, start - len(pointers)), -1):
        node = pointers[at % len(pointers)]
        head = nodes[node, HEAD]
        if head == NONE:  # nor has a longer suffix children
            break
        if nodes[head, NEXT] != NONE:  # an only child is not mapped
            found[count] = slot_of(node, token, len(slots))
            fetch(slots, found[count])
            count += 1
    for i in range(count):
        found[i] = max(slots[found[i]], ROOT)  # which is at hand, where there is no child
        fetch(nodes, found[i])
        fetch(run_of, found[i])
    for i in range(count):
        fetch(runs, run_of[found[i]])
    for i in range(count):
        found[i] = runs[run_of[found[i]], FIRST]
        fetch(nodes, found[i])
    for i in range(count):
        fetch(nodes, nodes[found[i], PREV])


@bare
def advance(tree: Nodes, pointers: np.ndarray, token: int, position: int) -> None:
    """Moves all pointers by one token. The two common cases touch nothing but their own nodes."""
    nodes, texts = tree.nodes, tree.texts
    for i in range(len(pointers)):
        node = pointers[i]
        row, child = nodes[node], nodes[node, HEAD]
        if node == ROOT:
            pointers[i] = descend(tree, node, token, position)
        elif child == NONE and row[COUNT] == 1:  # a leaf that only this suffix has reached
            row[LENGTH] += 1
            row[END] = position
        elif child == NONE or nodes[child, COUNT] != row[COUNT] - 1 or nodes[child, TOKEN] != token:
            pointers[i] = descend(tree, node, token, position)
        elif nodes[child, LENGTH] == 1:  # all suffixes through `node` have gone on to its child
            nodes[child, COUNT] += 1
            nodes[child, END] = younger(texts, nodes[child, END], position)
            merge(tree, node, child)
            pointers[i] = child
        else:  # as before, and the border between the two moves by a token
            nodes[child, LENGTH] -= 1
            row[LENGTH] += 1
            row[END] = younger(
                texts, back(texts, nodes[child, END], nodes[child, LENGTH]), position
            )
            nodes[child, TOKEN] = first_token(texts, nodes, child)


@bare
def descend(tree: Nodes, node: int, token: int, position: int) -> int:
    """The node one token below `node`, with one more occurrence; it may be new."""
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


@bare
def younger(texts: Texts, old: int, new: int) -> int:
    """Of two ends of one path the one in the younger text; the new one if that is the same."""
    births = texts.links[:, BIRTH]
    return new if births[new // PAGE] >= births[old // PAGE] else old


@bare
def first_token(texts: Texts, nodes: np.ndarray, node: int) -> int:
    """The first token of the edge to a node, read from its text."""
    return token_at(texts, back(texts, nodes[node, END], nodes[node, LENGTH] - 1))


@bare
def merge(tree: Nodes, node: int, child: int) -> None:
    """Joins a node and its only child, of equal count, into the child."""
    nodes = tree.nodes
    leave_run(tree, child)
    nodes[child, TOKEN] = nodes[node, TOKEN]
    nodes[child, LENGTH] += nodes[node, LENGTH]
    replace(tree, node, child)
    release(tree.node_pool, nodes, NEXT, node)


@bare
def split(tree: Nodes, node: int) -> int:
    """Cuts the edge to `node` behind its first token; returns the new node there."""
    nodes = tree.nodes
    rest = nodes[node, LENGTH] - 1
    end = back(tree.texts, nodes[node, END], rest)
    upper = new_node(tree, nodes[node, TOKEN], nodes[node, COUNT], 1, end)
    replace(tree, node, upper)
    nodes[node, LENGTH] = rest
    nodes[node, TOKEN] = first_token(tree.texts, nodes, node)
    adopt(tree, upper, node)
    return upper


@njit(cache=True, nogil=True)
def remove(tree: Nodes, state: np.ndarray, depth: int) -> None:
    """Takes back every suffix of the oldest text, and its pages."""
    text = gather(tree.texts, state)
    for start in range(len(text)):
        forget(tree, text[start : start + depth])
    erase(tree.texts, state)


@bare
def forget(tree: Nodes, suffix: np.ndarray) -> None:
    """One occurrence less of every prefix of a suffix."""
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
        tidy(tree, node)
        if child == NONE:
            return
        node = child
    tidy(tree, node)


@bare
def tidy(tree: Nodes, node: int) -> None:
    """Merges a node with an only child of the same count."""
    child = tree.nodes[node, HEAD]
    if node != ROOT and child != NONE and tree.nodes[child, COUNT] == tree.nodes[node, COUNT]:
        merge(tree, node, child)
