"""Attribution and novelty: spans of a text that occur in an index.

Spans are maximal: no span contains another. They are ranked by the unigram probability of their
tokens, so that a rare quotation comes before a common phrase.
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
from forerun.utils.numbers import whole

if TYPE_CHECKING:
    from forerun.ngrams.index.query.engine import Ids, Index, Match

NO_ID = -2  # matches nothing


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
    """The share of a text outside matching spans of at least n tokens, per n."""

    lengths: list[int]
    uncovered: list[float]  # share of the tokens
    index: float  # their mean: the creativity index


def longest_matches(index: Index, query: Ids, longest: int = 0) -> np.ndarray:
    """The length of the longest match from every position, int64 [n].

    longest: limit of a length, 0: none. A match does not cross the end of a document.
    """
    longest = whole("longest", longest, 0)
    q = index.ids(query)
    q[q == index.separator] = NO_ID
    best = np.zeros(len(q), np.int64)
    out = np.empty(len(q), np.int64)
    for shard in index.shards:
        kernels.longest_prefixes(shard, q, longest or max(1, len(q)), out)
        np.maximum(best, out, out=best)
    index.check_reads()
    return best


def maximal(lengths: Many[int], may_start: Iterable[bool] | None = None) -> list[tuple[int, int]]:
    """[start, stop) of the matches contained in no other match, with an allowed start."""
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
    """Maximal spans of a text that occur in the index, the least likely first.

    min_length: tokens. max_count: drop spans with more occurrences. delimiters: ids that end a
    span. word_starts: ids that may start a span. documents: passages per span.
    """
    whole("min_length", min_length)
    whole("documents", documents, 0)
    for name, value in (("max_count", max_count), ("limit", limit)):
        if value is not None:
            whole(name, value, 0)
    tokens = [int(t) for t in index.ids(query)]
    cut = [NO_ID if t == index.separator or t in delimiters else t for t in tokens]
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
    """The log of a token's share of all positions; -inf if it does not occur."""
    count = index.count([token])
    return math.log(count / index.tokens) if count else -math.inf


def novelty(index: Index, query: Ids, lengths: Iterable[int] = range(5, 12)) -> Novelty:
    """The share of tokens not covered by a matching span of at least n tokens, per n."""
    sizes = [whole("a length", n) for n in lengths]
    if not sizes:
        raise ConfigError("expected lengths, got none; use lengths of 1 or more tokens")
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
