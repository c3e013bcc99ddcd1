"""Several terms, and the documents they are in, against brute force over the documents."""

from __future__ import annotations

from collections import Counter

import numpy as np
from brute import Brute, both, documents, shard_counts
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ngrams.index.query.engine import Index

# several terms


def ranges_by_definition(brute: Brute, shard: int, cnf, most: int) -> list[tuple[int, int]]:
    """Clause after clause, rarest first, looking at all positions."""
    text = brute.texts[shard]
    clauses = [
        sorted({i for term in clause for s, i in brute.hits(term) if s == shard}) for clause in cnf
    ]
    clauses.sort(key=len)
    ranges = [(p, p) for p in clauses[0]]

    def fits(first: int | None, last: int | None) -> bool:
        if first is None or last is None:
            return False
        return last - first <= most and brute.end not in text[first : last + 1]

    for positions in clauses[1:]:
        grown = []
        for low, high in ranges:
            if any(low <= p <= high for p in positions):
                grown.append((low, high))
                continue
            left = max((p for p in positions if p < low), default=None)
            right = min((p for p in positions if p > high), default=None)
            if fits(left, right):
                grown.append((left, right))
                continue
            if fits(left, high):
                grown.append((left, high))
            if fits(low, right):
                grown.append((low, right))
        ranges = grown
    return [r for r in ranges if brute.end not in text[r[0] : r[1] + 1]]


terms = st.lists(st.integers(0, 3), min_size=1, max_size=2)
cnfs = st.lists(st.lists(terms, min_size=1, max_size=2), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(documents, cnfs, shard_counts, st.integers(0, 9))
def test_cnf(docs, cnf, shards, most) -> None:
    index, brute = both(docs, 2, shards)
    found = index.find_cnf(cnf, max_diff_tokens=most)
    for s, ranges in enumerate(found.ranges):
        assert sorted(map(tuple, ranges.tolist())) == sorted(
            ranges_by_definition(brute, s, cnf, most)
        )
        for low, high in ranges.tolist():
            assert high - low <= most
            for clause in cnf:
                assert any(s2 == s and low <= i <= high for t in clause for s2, i in brute.hits(t))
    assert found.count == sum(map(len, found.ranges)) and not found.is_approximate
    if len(cnf) == 1 and len(cnf[0]) == 1:
        assert found.count == index.count(cnf[0][0])


def test_cnf_of_too_many_matches_is_scaled_by_a_real_quotient() -> None:
    index = Index.of([[1, 2] * 50])
    found = index.find_cnf([[[1]]], max_clause_freq=30)
    assert found.is_approximate and len(found.ranges[0]) == 30
    assert found.count == 50.0  # 30 x 50/30; whole division would give 30
    again = index.find_cnf([[[1]]], max_clause_freq=30)
    other = index.find_cnf([[[1]]], max_clause_freq=30, seed=5)
    assert np.array_equal(found.ranges[0], again.ranges[0])
    assert not np.array_equal(found.ranges[0], other.ranges[0])


# documents


@settings(max_examples=60, deadline=None)
@given(documents, shard_counts, st.integers(1, 9))
def test_documents_and_windows(docs, shards, window) -> None:
    index = Index.of(docs, shards=shards)
    if len(docs) >= shards:
        for i, doc in enumerate(docs):
            passage = index.document(i, window=100)
            assert (passage.ids, passage.length, passage.document) == (doc, len(doc), i)
    for p in index.search([1], limit=50, window=window):
        doc = docs[p.document]
        at = p.position - int(index.library.starts[p.shard][p.document // shards]) - 1
        low = max(0, at - window // 2)
        assert doc[at] == 1 and p.ids == doc[low : low + window] and p.offset == at - low
        assert p.shown == len(p.ids) <= window
    hits = {(p.shard, p.position) for p in index.search([1], limit=1000)}
    assert len(hits) == index.count([1])


def test_search_draws_fairly_and_by_seed() -> None:
    index = Index.of([[1], [1], [1], [1]], shards=2)
    counts = Counter(index.search([1], seed=seed)[0].document for seed in range(400))
    assert set(counts) == {0, 1, 2, 3} and max(counts.values()) < 160
    one, two = index.search([1], seed=3), index.search([1], seed=3)
    assert one == two and index.search([2]) == []


def test_search_of_several_terms() -> None:
    index = Index.of([[1, 5, 5, 2], [1, 5, 5, 5, 5, 2], [2, 1]])
    found = index.search_cnf([[[1]], [[2]]], limit=9, limits={"max_diff_tokens": 3})
    assert sorted(p.document for p in found) == [0, 2]


def test_blocked_documents_show_nothing() -> None:
    from forerun.ngrams.index.query import documents as passages

    docs = [[1, 2], [1, 3]]
    plain = Index.of(docs)
    library = passages.Library(plain.library.starts, [], [], frozenset({1}))
    index = Index(plain.shards, library=library)
    shown = {p.document: p for p in index.search([1], limit=9)}
    assert shown[1].is_blocked and shown[1].ids == [] and shown[0].ids == [1, 2]
