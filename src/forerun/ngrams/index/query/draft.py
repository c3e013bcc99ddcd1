"""One call per tree: a template filled from an index, with one search for the whole tree.

What is drawn after the longest suffix s of a text that occurs has followed s somewhere, and no
longer suffix occurs: so with the drawn token s is again the longest one, and its interval of ranks
lies inside the one before. Only where s has as many tokens as are looked for, and behind the end of
a document (whose id may also stand for the text's end), the index is searched anew.

The fast form of the growers `gumbel` and `template` over the source of `drafters/infini.py`: same
nodes, same q, same uniforms in the same order (tests compare them node by node).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from forerun.core.tree import Tree
from forerun.core.tree_template import Shape
from forerun.ngrams.index.build.suffix_array import Shard
from forerun.ngrams.index.query.continuation_kernels import bound
from forerun.ngrams.index.query.kernels import longest_suffix, next_tokens
from forerun.ngrams.tables.logits.draft_template import Buffers, buffers, desk, tree_of, walk
from forerun.ngrams.tables.logits.kernels import TINY, Arrays
from forerun.utils.jit import bare


class Wish(NamedTuple):
    """What is looked for, and what is kept of it: the options of the drafter."""

    context: int  # longest suffix
    min_length: int
    min_count: int
    entries: int
    max_support: int
    vocab_size: int
    eos: int  # the id that a separator or the text's end stands for
    separator: int
    power: float  # counts become q by it


class Room(NamedTuple):
    """What following a text takes."""

    query: np.ndarray  # int64 [context + depth], the context of the root first
    spans: np.ndarray  # int64 [N + 1, 3]: length, left, right of every node's match; first the root
    ids: np.ndarray  # int64, what comes next
    counts: np.ndarray  # int64


def draft(
    shard: Shard,
    query: np.ndarray,
    wish: Wish,
    shape: Shape,
    depth: int,
    uniforms: np.ndarray | None,
) -> tuple[Tree, int]:
    """The first places of a template, down to `depth`, below the text's last ids, int64 [<= n].

    With uniforms, children are drawn without replacement; without, they are the best tokens.
    Returns the tree and how many uniforms it used: one per entry of every q.
    """
    size, known = len(shape.parents), len(query)
    out = buffers(size, wish.entries)
    room = Room(
        np.concatenate([query, np.empty(min(depth, size), np.int64)]),
        np.empty((size + 1, 3), np.int64),
        np.empty(4 * wish.max_support + 9, np.int64),
        np.empty(4 * wish.max_support + 9, np.int64),
    )
    is_drawn = uniforms is not None
    given = out.q_probs if uniforms is None else uniforms
    places = shape.depths, shape.widths, shape.firsts
    nodes, rows, used = fill_places(
        shard[:], wish[:], known, places, depth, is_drawn, given, out[:], room[:]
    )
    return tree_of(out, nodes, rows), used


class Corpus(NamedTuple):
    """An index below a text of `known` ids, as `law_after` asks it."""

    shard: Shard
    wish: Wish
    known: int
    room: Room


@njit(cache=True, nogil=True)
def fill_places(
    index: Arrays,
    wish: Arrays,
    known: int,
    places: Arrays,
    depth: int,
    is_drawn: bool,
    uniforms: np.ndarray,
    tree: Arrays,
    work: Arrays,
) -> tuple[int, int, int]:
    """`walk` through an index. The tuples: a Shard, a Wish, a Shape, Buffers and a Room."""
    corpus = Corpus(Shard(*index), Wish(*wish), known, Room(*work))
    work = desk(len(places[0]), corpus.wish.entries)
    return walk(law_after, corpus, places, depth, is_drawn, uniforms, Buffers(*tree), work)


@njit(cache=True, nogil=True)
def law_after(corpus: Corpus, node: int, out: Buffers, filled: int) -> int:
    """Writes q below a node, from entry `filled` on; returns its size, 0 if nothing is known."""
    shard, wish, known, room = corpus
    find(shard, wish, known, node, out, room)
    return law_of(shard, wish, room.spans[node + 1], out, filled, room)


@bare
def find(shard: Shard, wish: Wish, known: int, node: int, out: Buffers, room: Room) -> None:
    """Writes the span of a node: the longest suffix that occurs, and where."""
    span = room.spans[node + 1]
    if node >= 0:
        above, token = room.spans[out.parents[node] + 1], int(out.tokens[node])
        if token != wish.eos and above[0] < wish.context:
            low = bound(shard, above[0], above[1], above[2], token)
            span[0], span[1] = above[0] + 1, low
            span[2] = bound(shard, above[0], low, above[2], token + 1)
            return
    size, at = known, node
    while at >= 0:
        size, at = size + 1, int(out.parents[at])
    end, at = size, node
    while at >= 0:
        end -= 1
        token = int(out.tokens[at])
        room.query[end] = wish.separator if token == wish.eos else token
        at = int(out.parents[at])
    span[0], span[1], span[2] = longest_suffix(shard, room.query, max(0, size - wish.context), size)


@njit(cache=True, nogil=True)
def law_of(
    shard: Shard, wish: Wish, span: np.ndarray, out: Buffers, filled: int, room: Room
) -> int:
    """Writes what follows a match as q, by rising id, from entry `filled` on; returns its size."""
    length, total, ids, counts = span[0], span[2] - span[1], room.ids, room.counts
    if length < wish.min_length or total < wish.min_count:
        return 0
    unit = 1
    while unit * wish.max_support < total:
        unit *= 2
    size = next_tokens(shard, length, span[1], span[2], unit, ids, counts)
    size = close(wish, ids, counts, size)
    while size and ids[size - 1] >= wish.vocab_size:
        size -= 1
    if not size:
        return 0
    least, ties = np.int64(0), size  # counts above are kept, and so many of this one
    if size > wish.entries:
        least = np.partition(counts[:size], size - wish.entries)[size - wish.entries]
        ties = wish.entries - (counts[:size] > least).sum()
    largest, sum_, held = np.float64(counts[:size].max()), 0.0, 0
    for j in range(size):
        if counts[j] < least or (counts[j] == least and ties == 0):
            continue
        if counts[j] == least:
            ties -= 1
        weight = counts[j] / largest
        if wish.power != 1.0:
            weight = math.pow(weight, wish.power)
        if weight > TINY:
            out.q_ids[filled + held], out.q_probs[filled + held] = ids[j], weight
            sum_ += weight
            held += 1
    for j in range(filled, filled + held):
        out.q_probs[j] /= sum_
    return held


@bare
def close(wish: Wish, ids: np.ndarray, counts: np.ndarray, size: int) -> int:
    """Puts both kinds of end, the first and the last of rising ids, where the end id belongs."""
    ends = np.int64(0)
    if size and ids[size - 1] == wish.separator:
        size -= 1
        ends += counts[size]
    first = 1 if size and ids[0] < 0 else 0
    ends += counts[:first].sum()
    at = 0  # ids below the end id move down over the text's end
    for j in range(first, size):
        if ids[j] < wish.eos:
            ids[at], counts[at] = ids[j], counts[j]
            at += 1
    if not ends:
        return size
    if first:
        ids[at], counts[at] = wish.eos, ends
        return size
    for j in range(size, at, -1):
        ids[j], counts[j] = ids[j - 1], counts[j - 1]
    ids[at], counts[at] = wish.eos, ends
    return size + 1
