"""Fills a draft template from an index, in one call per tree.

Let s be the longest suffix of the text that occurs in the index, and x a drawn token. Then sx
occurs and is again the longest suffix, and its interval of ranks is inside the interval of s. The
index is searched again only if s has the maximal length, and after the end of a document.

This is the compiled form of the growers `gumbel` and `template` over the source of
`drafters/infini.py`: same nodes, same q, same uniforms in the same order (tests compare them).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forerun.core.tree import Tree
from forerun.core.tree_template import Shape
from forerun.ngrams.index.build.suffix_array import Shard
from forerun.ngrams.index.query.continuation_kernels import lower_bound
from forerun.ngrams.index.query.kernels import longest_suffix, next_tokens
from forerun.ngrams.tables.logits.draft_template import (
    Buffers,
    buffers,
    new_workspace,
    tree_of,
    walk,
)
from forerun.ngrams.tables.logits.kernels import TINY, Arrays
from forerun.utils.jit import compiled, kernel

if TYPE_CHECKING:
    from forerun.ngrams.index.query.engine import Index


class IndexOptions(NamedTuple):
    """Options of drafter `infini`."""

    context: int  # longest suffix
    min_length: int
    min_count: int
    entries: int
    max_support: int
    vocab_size: int
    eos: int  # replaces a separator and the text's end
    separator: int
    power: float  # q is proportional to count ** power


class Workspace(NamedTuple):
    """Scratch arrays of one tree."""

    query: np.ndarray  # int64 [context + depth], the context of the root first
    spans: np.ndarray  # int64 [N + 1, 3]: length, left, right of each match; the root first
    ids: np.ndarray  # int64, next tokens
    counts: np.ndarray  # int64


def draft(
    index: Index,
    query: np.ndarray,
    options: IndexOptions,
    shape: Shape,
    depth: int,
    uniforms: np.ndarray | None,
) -> tuple[Tree, int]:
    """A tree with the first places of a template, down to `depth`, from an index of one shard.

    query: the last ids of the text, int64. With uniforms, children are drawn without replacement;
    without, they are the most likely tokens. Returns the tree and the number of uniforms used: one
    per entry of every q.
    """
    size, known = len(shape.parents), len(query)
    out = buffers(size, options.entries)
    space = Workspace(
        np.concatenate([query, np.empty(min(depth, size), np.int64)]),
        np.empty((size + 1, 3), np.int64),
        np.empty(4 * options.max_support + 9, np.int64),
        np.empty(4 * options.max_support + 9, np.int64),
    )
    is_drawn = uniforms is not None
    given = out.q_probs if uniforms is None else uniforms
    places = shape.depths, shape.widths, shape.firsts
    nodes, rows, used = fill_places(
        index.shards[0][:], options[:], known, places, depth, is_drawn, given, out[:], space[:]
    )
    index.check_reads()
    return tree_of(out, nodes, rows), used


class Corpus(NamedTuple):
    """The source of `law_after`: an index and a text of `known` ids."""

    shard: Shard
    options: IndexOptions
    known: int
    space: Workspace


@compiled
def fill_places(
    index: Arrays,
    options: Arrays,
    known: int,
    places: Arrays,
    depth: int,
    is_drawn: bool,
    uniforms: np.ndarray,
    tree: Arrays,
    work: Arrays,
) -> tuple[int, int, int]:
    """`walk` with an index as source.

    index, options, places, tree, work: fields of Shard, IndexOptions, Shape, Buffers, Workspace.
    """
    corpus = Corpus(Shard(*index), IndexOptions(*options), known, Workspace(*work))
    work = new_workspace(len(places[0]), corpus.options.entries)
    return walk(law_after, corpus, places, depth, is_drawn, uniforms, Buffers(*tree), work)


@compiled
def law_after(corpus: Corpus, node: int, out: Buffers, filled: int) -> int:
    """Writes q below a node, from entry `filled`; returns its size, 0 without a match."""
    shard, options, known, space = corpus
    find(shard, options, known, node, out, space)
    return law_of(shard, options, space.spans[node + 1], out, filled, space)


@kernel
def find(
    shard: Shard, options: IndexOptions, known: int, node: int, out: Buffers, space: Workspace
) -> None:
    """Writes the span of a node: length and interval of the longest suffix that occurs."""
    span = space.spans[node + 1]
    if node >= 0:
        above, token = space.spans[out.parents[node] + 1], int(out.tokens[node])
        if token != options.eos and above[0] < options.context:
            low = lower_bound(shard, above[0], above[1], above[2], token)
            span[0], span[1] = above[0] + 1, low
            span[2] = lower_bound(shard, above[0], low, above[2], token + 1)
            return
    size, at = known, node
    while at >= 0:
        size, at = size + 1, int(out.parents[at])
    end, at = size, node
    while at >= 0:
        end -= 1
        token = int(out.tokens[at])
        space.query[end] = options.separator if token == options.eos else token
        at = int(out.parents[at])
    low = max(0, size - options.context)
    span[0], span[1], span[2] = longest_suffix(shard, space.query, low, size)


@compiled
def law_of(
    shard: Shard,
    options: IndexOptions,
    span: np.ndarray,
    out: Buffers,
    filled: int,
    space: Workspace,
) -> int:
    """Writes q from the next tokens of a match, by rising id; returns its size."""
    length, total, ids, counts = span[0], span[2] - span[1], space.ids, space.counts
    if length < options.min_length or total < options.min_count:
        return 0
    unit = 1
    while unit * options.max_support < total:
        unit *= 2
    size = next_tokens(shard, length, span[1], span[2], unit, ids, counts)
    size = merge_ends(options, ids, counts, size)
    while size and ids[size - 1] >= options.vocab_size:
        size -= 1
    if not size:
        return 0
    least, ties = np.int64(0), size  # kept: counts > least, and `ties` entries of count `least`
    if size > options.entries:
        least = np.partition(counts[:size], size - options.entries)[size - options.entries]
        ties = options.entries - (counts[:size] > least).sum()
    largest, sum_, kept = np.float64(counts[:size].max()), 0.0, 0
    for j in range(size):
        if counts[j] < least or (counts[j] == least and ties == 0):
            continue
        if not 0 <= ids[j] < options.vocab_size:  # of a damaged file that is not verified
            continue
        if counts[j] == least:
            ties -= 1
        weight = counts[j] / largest
        if options.power != 1.0:
            weight = math.pow(weight, options.power)
        if weight > TINY:
            out.q_ids[filled + kept], out.q_probs[filled + kept] = ids[j], weight
            sum_ += weight
            kept += 1
    for j in range(filled, filled + kept):
        out.q_probs[j] /= sum_
    return kept


@kernel
def merge_ends(options: IndexOptions, ids: np.ndarray, counts: np.ndarray, size: int) -> int:
    """Merges END (the first id) and the separator (the last id) into eos, sorted by id."""
    ends = np.int64(0)
    if size and ids[size - 1] == options.separator:
        size -= 1
        ends += counts[size]
    first = 1 if size and ids[0] < 0 else 0
    ends += counts[:first].sum()
    at = 0  # ids below eos move down by one
    for j in range(first, size):
        if ids[j] < options.eos:
            ids[at], counts[at] = ids[j], counts[j]
            at += 1
    if not ends:
        return size
    if first:
        ids[at], counts[at] = options.eos, ends
        return size
    for j in range(size, at, -1):
        ids[j], counts[j] = ids[j - 1], counts[j - 1]
    ids[at], counts[at] = options.eos, ends
    return size + 1
