"""Drafts the best continuation from a counted suffix tree, in one call.

For each length m of a match, the candidates are the min(nodes, factor * m + offset) most frequent
continuations. D of a node is the share of the match's occurrences that continue along its path. The
score is the sum of D over the candidates: the expected number of accepted tokens. The best score
wins; ties: the longer match.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.ngrams.tables.logits.kernels import Arrays
from forerun.ngrams.tables.suffix.hash_maps import LENGTH as SIZE
from forerun.ngrams.tables.suffix.hash_maps import NONE, Texts, back, token_at
from forerun.ngrams.tables.suffix.nodes import COUNT, END, HEAD, LENGTH, NEXT
from forerun.utils.jit import copy, kernel

NODE, OFFSET, PARENT, PLACES = 0, 1, 2, 3  # columns of the frontier


class Counted(NamedTuple):
    """The parts of a suffix tree that a draft reads."""

    nodes: np.ndarray  # of Nodes
    texts: Texts


class DraftLimits(NamedTuple):
    """Limits of a draft: at most min(nodes, factor * match + offset) tokens, `depth` deep."""

    nodes: int
    depth: int
    factor: float
    offset: float
    min_prob: float  # of a drafted token, given the match
    width: int  # children per node; 1 drafts a path


@kernel
def speculate(
    nodes: np.ndarray,
    pages: np.ndarray,
    links: np.ndarray,
    pool: np.ndarray,
    state: np.ndarray,
    pointers: np.ndarray,
    limit_values: Arrays,
    at_least: float,
    frontier: np.ndarray,
    out: np.ndarray,
) -> tuple[int, float, int]:
    """Writes the best draft with a score above `at_least`; returns its size, score and match.

    Matches longer than half of the tree's depth are skipped: little depth remains for the draft.
    Matches with equal counts have the same continuations, so only the longest is tried. nodes: of
    Nodes; pages, links, pool: fields of Texts; limit_values: fields of DraftLimits; frontier: int32
    [nodes, 4]; out: int32 [5, nodes], its last two rows receive tokens and parents.
    """
    limits, tree = DraftLimits(*limit_values), Counted(nodes, Texts(pages, links, pool))  # type: ignore[call-arg]
    depths, some_tokens, some_parents, tokens, parents = out
    depth, best, kept, match, seen = len(pointers), at_least, 0, 0, 0
    for length in range(min(state[SIZE], depth // 2), 0, -1):
        budget = min(limits.nodes, int(limits.factor * length + limits.offset + 1e-6))
        if best >= budget:  # a score is at most the draft's size
            break
        node = pointers[(state[SIZE] - length) % depth]
        places = tree.nodes[node, COUNT] - 1  # without the end of the text itself
        if places == seen or tree.nodes[node, HEAD] == NONE:
            continue
        seen = places
        drafted, total = grow(
            tree, node, places, limits, frontier[:budget], depths, some_tokens, some_parents
        )
        if total / places > best:
            best, kept, match = total / places, drafted, length
            copy(some_tokens[:drafted], tokens)
            copy(some_parents[:drafted], parents)
    return kept, best, match


@kernel
def grow(
    tree: Counted,
    start: int,
    places: int,
    limits: DraftLimits,
    frontier: np.ndarray,
    depths: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
) -> tuple[int, int]:
    """The most frequent continuations, best first; returns their number and sum of counts.

    frontier[drafted:filled] is sorted by count; ties: first added first.
    """
    least = limits.min_prob * places - 1e-9
    drafted, total = 0, 0
    filled = push_children(tree, start, least, limits.width, NONE, frontier, 0, 0)
    while drafted < filled:
        node, offset, parent, count = frontier[drafted]
        end, length = tree.nodes[node, END], tree.nodes[node, LENGTH]
        tokens[drafted] = token_at(tree.texts, back(tree.texts, end, length - 1 - offset))
        parents[drafted] = parent
        depths[drafted] = 1 if parent == NONE else depths[parent] + 1
        total += count
        drafted += 1
        if depths[drafted - 1] >= limits.depth:
            continue
        if offset + 1 < length:
            filled = push(frontier, drafted, filled, node, offset + 1, drafted - 1, count)
        else:
            filled = push_children(
                tree, node, least, limits.width, drafted - 1, frontier, drafted, filled
            )
    return drafted, total


@kernel
def push_children(
    tree: Counted,
    node: int,
    least: float,
    width: int,
    parent: int,
    frontier: np.ndarray,
    first: int,
    filled: int,
) -> int:
    """Adds the most frequent children to the frontier; returns its end."""
    child, left = tree.nodes[node, HEAD], min(width, len(frontier) - first)
    while child != NONE and left > 0 and tree.nodes[child, COUNT] >= least:
        filled = push(frontier, first, filled, child, 0, parent, tree.nodes[child, COUNT])
        child = tree.nodes[child, NEXT]
        left -= 1
    return filled


@kernel
def push(
    frontier: np.ndarray, first: int, filled: int, node: int, offset: int, parent: int, count: int
) -> int:
    """Inserts a candidate unless the frontier is full of better ones; returns its end."""
    at = filled
    if filled == len(frontier):
        if filled == first or frontier[filled - 1, PLACES] >= count:
            return filled
        at -= 1
    else:
        filled += 1
    while at > first and frontier[at - 1, PLACES] < count:
        copy(frontier[at - 1], frontier[at])
        at -= 1
    row = frontier[at]
    row[NODE], row[OFFSET], row[PARENT], row[PLACES] = node, offset, parent, count
    return filled
