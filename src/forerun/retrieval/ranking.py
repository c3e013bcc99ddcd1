"""Ranks documents by weighted n-grams (SEAL's "intersective" score).

Bevilacqua et al., "Autoregressive Search Engines", 2022. First stage: the occurrences of rare
n-grams give candidate documents, scored by the sum of their n-grams. Second stage: the best
candidates are scored on their full text, with all n-grams and with single tokens at positions that
no n-gram covers.

Within a document n-grams are credited greedily by falling weight. Each counts once, at its first
position that overlaps no credited n-gram, times `cover` for its share of new tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.ngrams.index.fm.index import FMIndex
from forerun.retrieval.weights import cover
from forerun.utils.jit import compiled


class Grams(NamedTuple):
    """The n-grams of one query, by falling weight."""

    tokens: np.ndarray  # int64 [m, max length], -1 after the end
    lengths: np.ndarray  # int64 [m]
    counts: np.ndarray  # int64 [m]: F
    logps: np.ndarray  # float64 [m]: log P_q
    weights: np.ndarray  # float64 [m]

    def text(self, i: int) -> tuple[int, ...]:
        """The tokens of n-gram i."""
        return tuple(self.tokens[i, : self.lengths[i]].tolist())


class Ranked(NamedTuple):
    """Documents with scores, best first."""

    documents: np.ndarray  # int64 [d]
    scores: np.ndarray  # float64 [d]


NO_DOCUMENTS = Ranked(np.zeros(0, np.int64), np.zeros(0))


class Hits(NamedTuple):
    """Occurrences of n-grams in the text of an index."""

    documents: np.ndarray  # int64 [h]
    grams: np.ndarray  # int64 [h]: index into Grams
    starts: np.ndarray  # int64 [h]: positions


def occurrences(index: FMIndex, grams: Grams, limit: int) -> Hits:
    """Up to `limit` occurrences of every n-gram."""
    found = [index.locate(index.find(grams.text(i)), limit) for i in range(len(grams.lengths))]
    num_found = np.array([len(places) for places in found], np.int64)
    gram = np.repeat(np.arange(len(num_found)), num_found)
    stops = np.concatenate([np.zeros(0, np.int64), *found])
    # the document is that of the last token: a title n-gram begins with the previous eos
    return Hits(index.document_of(stops - 1), gram, stops - grams.lengths[gram])


def best_single(hits: Hits, values: np.ndarray) -> Ranked:
    """Documents by the largest value [m] of their n-grams."""
    documents, places = np.unique(hits.documents, return_inverse=True)
    scores = np.full(len(documents), -np.inf)
    np.maximum.at(scores, places, values[hits.grams])
    return _ranked(documents, scores)


def first_stage(hits: Hits, grams: Grams, beta: float) -> Ranked:
    """Documents by the sum of their credited n-grams."""
    order = np.lexsort((hits.starts, hits.grams, hits.documents))
    documents, grams_at, starts = (part[order] for part in hits)
    distinct, begins = np.unique(documents, return_index=True)
    begins = np.append(begins, len(documents))
    scores = np.zeros(len(distinct))
    credit_all(begins, grams_at, starts, grams.tokens, grams.lengths, grams.weights, beta, scores)
    return _ranked(distinct, scores)


def full_score(
    index: FMIndex, documents: np.ndarray, grams: Grams, singles: np.ndarray, beta: float
) -> Ranked:
    """Documents by all n-grams and by single tokens at free positions. singles: weights [V]."""
    order = np.lexsort(grams.tokens.T[::-1])  # lexicographic
    table = np.ascontiguousarray(grams.tokens[order])
    scores = np.zeros(len(documents))
    for i, number in enumerate(documents.tolist()):
        start, stop = int(index.starts[number]), int(index.starts[number + 1])
        text = index.text(start, stop)
        scores[i] = score_text(
            text, table, order, grams.tokens, grams.lengths, grams.weights, singles, beta
        )
    return _ranked(documents, scores)


def _ranked(documents: np.ndarray, scores: np.ndarray) -> Ranked:
    order = np.lexsort((documents, -scores))
    return Ranked(documents[order], scores[order])


@compiled
def credit_all(
    begins: np.ndarray,
    grams_at: np.ndarray,
    starts: np.ndarray,
    tokens: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray,
    beta: float,
    out: np.ndarray,
) -> None:
    """The score of every document from its hits, sorted by n-gram and position."""
    for d in range(len(out)):
        a, b = begins[d], begins[d + 1]
        out[d], _ = credit(grams_at[a:b], starts[a:b], tokens, lengths, weights, beta)


@compiled
def credit(
    grams_at: np.ndarray,
    starts: np.ndarray,
    tokens: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray,
    beta: float,
) -> tuple[float, list[tuple[int, int]]]:
    """The score of one document, and its credited (n-gram, position) pairs."""
    score, last = 0.0, -1
    credited = [(0, 0) for _ in range(0)]
    for k in range(len(grams_at)):
        gram, start = grams_at[k], starts[k]
        if gram == last or weights[gram] <= 0:
            continue
        stop, is_free = start + lengths[gram], True
        for other, at in credited:
            if start < at + lengths[other] and at < stop:
                is_free = False
                break
        if not is_free:
            continue
        new, size = novelty(gram, credited, tokens, lengths)
        score += weights[gram] * cover(new, size, beta)
        credited.append((gram, start))
        last = gram
    return score, credited


@compiled
def novelty(
    gram: int, credited: list[tuple[int, int]], tokens: np.ndarray, lengths: np.ndarray
) -> tuple[int, int]:
    """Number of distinct tokens of an n-gram outside the credited ones, and in all."""
    new, size = 0, 0
    for i in range(lengths[gram]):
        token, is_first = tokens[gram, i], True
        for j in range(i):
            is_first = is_first and tokens[gram, j] != token
        if is_first:
            size += 1
            new += not is_held(token, credited, tokens, lengths)
    return new, size


@compiled
def is_held(
    token: int, credited: list[tuple[int, int]], tokens: np.ndarray, lengths: np.ndarray
) -> bool:
    """Whether a credited n-gram contains the token."""
    for other, _ in credited:
        for i in range(lengths[other]):
            if tokens[other, i] == token:
                return True
    return False


@compiled
def score_text(
    text: np.ndarray,
    table: np.ndarray,
    order: np.ndarray,
    tokens: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray,
    singles: np.ndarray,
    beta: float,
) -> float:
    """The score of a text: all n-grams in it, then single tokens at positions without one.

    table: the n-grams in lexicographic order; order: their indices in `tokens`.
    """
    grams_at, starts = [0 for _ in range(0)], [0 for _ in range(0)]
    for start in range(len(text)):
        low, high = 0, len(table)
        for depth in range(min(table.shape[1], len(text) - start)):
            low, high = narrowed(table, depth, text[start + depth], low, high)
            if low == high:
                break
            for k in range(low, high):  # n-grams that end here come first
                if lengths[order[k]] != depth + 1:
                    break
                grams_at.append(order[k])
                starts.append(start)
    gram_of, place = np.array(grams_at, np.int64), np.array(starts, np.int64)
    by = np.argsort(gram_of * (len(text) + 1) + place)
    score, credited = credit(gram_of[by], place[by], tokens, lengths, weights, beta)
    taken = np.zeros(len(text), np.bool_)
    for gram, at in credited:
        taken[at : at + lengths[gram]] = True
    for i in range(len(text)):
        token, is_first = text[i], not taken[i]
        for j in range(i):
            is_first = is_first and (taken[j] or text[j] != token)
        if is_first and singles[token] > 0:
            is_new = not is_held(token, credited, tokens, lengths)
            score += singles[token] * cover(int(is_new), 1, beta)
    return score


@compiled
def narrowed(table: np.ndarray, column: int, token: int, low: int, high: int) -> tuple[int, int]:
    """The rows in [low, high) with the token in the column; the column is sorted there."""
    first, end = low, high
    while first < end:
        middle = (first + end) // 2
        if table[middle, column] < token:
            first = middle + 1
        else:
            end = middle
    end = high
    start = first
    while start < end:
        middle = (start + end) // 2
        if table[middle, column] <= token:
            start = middle + 1
        else:
            end = middle
    return first, start
