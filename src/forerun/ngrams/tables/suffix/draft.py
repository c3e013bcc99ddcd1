"""One call per tree: the best continuation that a counted suffix tree knows.

For each length m of a match, candidates are the min(nodes, factor * m + offset) most frequent
continuations; D of a node is the share of the match's places that go on along the node's path, and
the sum of D over the candidates, the expected number of accepted tokens, is their score. The best
score wins, the longer match in a tie.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.ngrams.tables.logits.kernels import Arrays
from forerun.ngrams.tables.suffix.hash_maps import LENGTH as SIZE
from forerun.ngrams.tables.suffix.hash_maps import NONE, Texts, back, token_at
from forerun.ngrams.tables.suffix.nodes import COUNT, END, HEAD, LENGTH, NEXT
from forerun.utils.jit import bare, copy

NODE, OFFSET, PARENT, PLACES = 0, 1, 2, 3  # columns of the frontier


class Counted(NamedTuple):
    """What a draft reads of a suffix tree."""

    nodes: np.ndarray  # of Nodes
    texts: Texts


class Wish(NamedTuple):
    """What a draft may be: at most min(nodes, factor * match + offset) tokens, `depth` deep."""

    nodes: int
    depth: int
    factor: float
    offset: float
    min_prob: float  # of a drafted token, given the match
    width: int  # children followed below one node: 1 drafts a path


@bare
def speculate(
    nodes: np.ndarray,
    pages: np.ndarray,
    links: np.ndarray,
    pool: np.ndarray,
    state: np.ndarray,
    pointers: np.ndarray,
    wishes: Arrays,
    at_least: float,
    frontier: np.ndarray,
    room: np.ndarray,
) -> tuple[int, float, int]:
    """Writes the best draft that scores more than `at_least`; returns its size, score and match.

    A match of more than half the depth of the tree leaves less than itself for the draft and is not
    tried. Matches of the same number of places have the same continuations: the longest is tried.
    nodes: of Nodes; pages, links, pool: Texts; wishes: a Wish; frontier: int32 [nodes, 4]; room:
    int32 [5, nodes], in its last two rows the tokens and parents of the best.
    """
    wish, tree = Wish(*wishes), Counted(nodes, Texts(pages, links, pool))  # type: ignore[call-arg]
    depths, some_tokens, some_parents, tokens, parents = room
    depth, best, kept, match, seen = len(pointers), at_least, 0, 0, 0
    for length in range(min(state[SIZE], depth // 2), 0, -1):
        budget = min(wish.nodes, int(wish.factor * length + wish.offset + 1e-6))
        if best >= budget:  # no draft of that size scores more
            break
        node = pointers[(state[SIZE] - length) % depth]
        places = tree.nodes[node, COUNT] - 1  # the end of the text itself goes on nowhere
        if places == seen or tree.nodes[node, HEAD] == NONE:
            continue
        seen = places
        drafted, total = grow(
            tree, node, places, wish, frontier[:budget], depths, some_tokens, some_parents
        )
        if total / places > best:
            best, kept, match = total / places, drafted, length
            copy(some_tokens[:drafted], tokens)
            copy(some_parents[:drafted], parents)
    return kept, best, match


@bare
def grow(
    tree: Counted,
    start: int,
    places: int,
    wish: Wish,
    frontier: np.ndarray,
    depths: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
) -> tuple[int, int]:
    """The most frequent continuations, best first; returns their number and sum of counts.

    frontier[drafted:waiting] is sorted; of equal counts the one that came first goes first.
    """
    least = wish.min_prob * places - 1e-9
    drafted, total = 0, 0
    waiting = push_children(tree, start, least, wish.width, NONE, frontier, 0, 0)
    while drafted < waiting:
        node, offset, parent, count = frontier[drafted]
        end, length = tree.nodes[node, END], tree.nodes[node, LENGTH]
        tokens[drafted] = token_at(tree.texts, back(tree.texts, end, length - 1 - offset))
        parents[drafted] = parent
        depths[drafted] = 1 if parent == NONE else depths[parent] + 1
        total += count
        drafted += 1
        if depths[drafted - 1] >= wish.depth:
            continue
        if offset + 1 < length:
            waiting = push(frontier, drafted, waiting, node, offset + 1, drafted - 1, count)
        else:
            waiting = push_children(
                tree, node, least, wish.width, drafted - 1, frontier, drafted, waiting
            )
    return drafted, total


@bare
def push_children(
    tree: Counted,
    node: int,
    least: float,
    width: int,
    parent: int,
    frontier: np.ndarray,
    first: int,
    waiting: int,
) -> int:
    """Adds the most frequent children to the frontier; returns where it ends."""
    child, room = tree.nodes[node, HEAD], min(width, len(frontier) - first)
    while child != NONE and room > 0 and tree.nodes[child, COUNT] >= least:
        waiting = push(frontier, first, waiting, child, 0, parent, tree.nodes[child, COUNT])
        child = tree.nodes[child, NEXT]
        room -= 1
    return waiting


@bare
def push(
    frontier: np.ndarray, first: int, waiting: int, node: int, offset: int, parent: int, count: int
) -> int:
    """Adds one candidate in its place, if there is one; returns where the frontier ends."""
    at = waiting
    if waiting == len(frontier):
        if waiting == first or frontier[waiting - 1, PLACES] >= count:
            return waiting
        at -= 1
    else:
        waiting += 1
    while at > first and frontier[at - 1, PLACES] < count:
        copy(frontier[at - 1], frontier[at])
        at -= 1
    row = frontier[at]
    row[NODE], row[OFFSET], row[PARENT], row[PLACES] = node, offset, parent, count
    return waiting
