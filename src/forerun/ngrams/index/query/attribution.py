"""Which stretches of a text occur in an index: attribution, and how much of a text is new.

Spans are maximal: none lies in another. They are ranked by how unlikely their tokens are one by
one, so that a rare quotation comes before a common phrase.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forerun.errors import ConfigError
from forerun.ngrams.index.query import documents as passages
from forerun.ngrams.index.query import kernels

if TYPE_CHECKING:
    from forerun.ngrams.index.query.engine import Ids, Index, Match

NOWHERE = -2


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of a text that occur in the index."""

    start: int
    stop: int
    count: int
    unigram_logp: float  # sum of log(count / tokens) of the single tokens, in nats
    documents: list[passages.Passage]


@dataclass(frozen=True)
class Novelty:
    """How much of a text lies in no span of at least n tokens that occurs, for every n."""

    lengths: list[int]
    uncovered: list[float]  # share of the tokens
    index: float  # their mean: the creativity index


def longest_matches(index: Index, query: Ids, longest: int = 0) -> np.ndarray:
    """For every position, how many tokens (at most `longest`, 0: any number) from there on occur.

    No match crosses the end of a document. int64 [n].
    """
    q = index.ids(query)
    q[q == index.separator] = NOWHERE
    best = np.zeros(len(q), np.int64)
    out = np.empty(len(q), np.int64)
    for shard in index.shards:
        kernels.longest_prefixes(shard, q, longest or max(1, len(q)), out)
        np.maximum(best, out, out=best)
    return best


def maximal(lengths: Many[int], may_start: Iterable[bool] | None = None) -> list[tuple[int, int]]:
    """[start, stop) of the matches that lie in no other, among those that may start."""
    allowed = [True] * len(lengths) if may_start is None else list(may_start)
    found, reach = [], 0
    for start, length in enumerate(lengths):
        if allowed[start] and length and start + length > reach:
            reach = start + int(length)
            found.append((start, reach))
    return found


def attribute(
    index: Index,
    query: Ids,
    *,
    min_length: int = 1,
    max_count: int | None = None,
    delimiters: Container[int] = (),
    word_starts: Container[int] | None = None,
    limit: int | None = None,
    documents: int = 1,
    window: int = 100,
    seed: int = 0,
) -> list[Span]:
    """Maximal spans of a text that occur in the index, the unlikeliest first.

    min_length: tokens. max_count: leave out what occurs more often. delimiters: ids that no span
    holds. word_starts: ids at which a span may start. documents: how many to show per span.
    """
    if min_length < 1 or documents < 0:
        raise ConfigError(
            f"min_length must be at least 1 and documents 0 or more, got {min_length}, {documents}"
        )
    tokens = [int(t) for t in index.ids(query)]
    cut = [NOWHERE if t == index.separator or t in delimiters else t for t in tokens]
    may_start = None if word_starts is None else (t in word_starts for t in cut)
    found = []
    for start, stop in maximal(longest_matches(index, cut).tolist(), may_start):
        match = index.find(cut[start:stop])
        if stop - start < min_length or (max_count is not None and match.count > max_count):
            continue
        logp = sum(unigram_logp(index, token) for token in cut[start:stop])
        found.append((start, stop, match, logp))
    found.sort(key=lambda row: (row[3], row[0]))
    return [
        Span(start, stop, match.count, logp, _show(index, match, documents, window, seed))
        for start, stop, match, logp in found[:limit]
    ]


def _show(
    index: Index, match: Match, documents: int, window: int, seed: int
) -> list[passages.Passage]:
    if not documents:
        return []
    return passages.search(index, match, 1, limit=documents, window=window, seed=seed)


def unigram_logp(index: Index, token: int) -> float:
    """log of a token's share of all positions; -inf if it does not occur."""
    count = index.count([token])
    return math.log(count / index.tokens) if count else -math.inf


def novelty(index: Index, query: Ids, lengths: Iterable[int] = range(5, 12)) -> Novelty:
    """The share of tokens that no matching span of at least n tokens covers, for each n."""
    sizes = list(lengths)
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"lengths must be 1 or more tokens, got {sizes}")
    matched = longest_matches(index, query)
    shares = []
    for n in sizes:
        edges = np.zeros(len(matched) + 1, np.int64)
        for start in np.flatnonzero(matched >= n):
            edges[start] += 1
            edges[start + matched[start]] -= 1
        covered = np.cumsum(edges[:-1]) > 0
        shares.append(float(1 - covered.mean()) if len(covered) else 0.0)
    return Novelty(sizes, shares, sum(shares) / len(shares))
