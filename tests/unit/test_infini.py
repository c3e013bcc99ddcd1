"""Every query of an index against brute force over the documents."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError, DataError
from forerun.ngrams import searching
from forerun.ngrams.answers import unit_for
from forerun.ngrams.fences import narrow
from forerun.ngrams.infini import Index
from forerun.ngrams.shards import shard_of
from forerun.ngrams.spans import maximal, novelty
from forerun.ngrams.suffix_array import TYPES, separator, unpack

WORKED = [[1, 2, 3, 1, 2], [2, 3, 4]]
END = 65535

documents = st.lists(st.lists(st.integers(0, 3), max_size=14), min_size=1, max_size=7)
queries = st.lists(st.integers(0, 4), max_size=6)
widths = st.sampled_from([1, 2, 4])
shard_counts = st.sampled_from([1, 3])


class Brute:
    """The same answers from lists."""

    def __init__(self, docs: list[list[int]], shards: int, end: int) -> None:
        self.texts = [[t for doc in docs[s::shards] for t in (end, *doc)] for s in range(shards)]
        self.end = end

    def hits(self, query: list[int]) -> list[tuple[int, int]]:
        return [
            (s, i)
            for s, text in enumerate(self.texts)
            for i in range(len(text))
            if text[i : i + len(query)] == query and i + len(query) <= len(text)
        ]

    def count(self, query: list[int]) -> int:
        return len(self.hits(query))

    def following(self, query: list[int]) -> Counter[int]:
        """The end of the data counts as the end of a document."""
        return Counter((self.texts[s] + [self.end])[i + len(query)] for s, i in self.hits(query))

    def longest_suffix(self, query: list[int]) -> int:
        return next(n for n in range(len(query), -1, -1) if self.count(query[len(query) - n :]))


def both(docs: list[list[int]], width: int, shards: int) -> tuple[Index, Brute]:
    return Index.of(docs, width=width, shards=shards), Brute(docs, shards, separator(TYPES[width]))


@settings(max_examples=120, deadline=None)
@given(documents, st.lists(queries, min_size=1, max_size=6), widths, shard_counts)
def test_counts(docs, asked, width, shards) -> None:
    index, brute = both(docs, width, shards)
    asked += docs[:1]  # a whole document
    expected = [brute.count(q) for q in asked]
    assert [index.count(q) for q in asked] == expected
    assert index.count_many(asked).tolist() == expected
    for q in asked:
        match = index.find(q)
        found = [
            (s, int(p))
            for s, (a, b) in enumerate(match.intervals)
            for p in unpack(index.shards[s].table, index.shards[s].width)[a:b]
        ]
        assert match.count == len(found) and sorted(found) == brute.hits(q)
    assert index.count([]) == index.tokens == sum(map(len, brute.texts))


@settings(max_examples=120, deadline=None)
@given(documents, queries, widths, shard_counts)
def test_next_tokens_and_probabilities(docs, context, width, shards) -> None:
    index, brute = both(docs, width, shards)
    for asked, found in (
        (context, index.ntd(context, None)),
        (
            context[len(context) - brute.longest_suffix(context) :],
            index.infgram_ntd(context, None),
        ),
    ):
        expected = brute.following(asked) if brute.count(asked) else Counter()
        if not asked:  # what follows nothing is every position's own token
            expected = Counter(t for text in brute.texts for t in text)
        assert dict(zip(found.ids.tolist(), found.counts.tolist(), strict=True)) == expected
        assert found.ids.tolist() == sorted(found.ids.tolist()) and not found.is_approximate
        assert found.context_count == found.counts.sum() == brute.count(asked)
        assert found.suffix_length == len(asked) or not asked
    total = 0.0
    for token in {*expected, 0, index.eos}:
        prob = index.infgram_prob(context, token)
        assert prob.count == expected[token] and prob.context_count == found.context_count
        assert prob.suffix_length == found.suffix_length
        total += prob.prob or 0.0
    assert math.isclose(total, 1.0)


@settings(max_examples=80, deadline=None)
@given(documents, queries, shard_counts)
def test_whole_context_probability(docs, context, shards) -> None:
    index, brute = both(docs, 2, shards)
    count, expected = brute.count(context), brute.following(context)
    for token in range(4):
        found = index.prob(context, token)
        assert (found.count, found.context_count) == (
            expected[token] if context else brute.count([token]),
            count,
        )
        assert found.prob == (found.count / count if count else None)


@settings(max_examples=80, deadline=None)
@given(documents, st.lists(queries, min_size=1, max_size=8), shard_counts, st.integers(1, 5))
def test_batches_equal_single_queries(docs, contexts, shards, support) -> None:
    index = Index.of(docs, shards=shards, threads=2)
    for many in (contexts, contexts * 20):  # few in this thread, many in a pool
        for context, found in zip(many, index.infgram_many(many, support), strict=True):
            one = index.infgram_ntd(context, support)
            assert np.array_equal(one.ids, found.ids) and np.array_equal(one.counts, found.counts)
            assert (one.context_count, one.suffix_length, one.is_approximate) == (
                found.context_count,
                found.suffix_length,
                found.is_approximate,
            )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=60), min_size=1, max_size=4),
    shard_counts,
    st.integers(1, 12),
)
def test_approximate_counts_add_up(docs, shards, support) -> None:
    index, brute = both(docs, 2, shards)
    for context in ([], [1], [2, 3]):
        found, count = index.ntd(context, support), brute.count(context)
        assert found.counts.sum() == found.context_count == count
        assert found.is_approximate == (count > support)
        known = brute.following(context) if context else {t for text in brute.texts for t in text}
        assert set(found.ids.tolist()) <= set(known)
        if count <= support and context:
            assert dict(zip(found.ids.tolist(), found.counts.tolist(), strict=True)) == known


def test_units_are_the_smallest_powers_of_two() -> None:
    assert [unit_for(n, 1000) for n in (0, 1, 1000, 1001, 2000, 2001, 4001)] == [
        1,
        1,
        1,
        2,
        2,
        4,
        8,
    ]
    assert unit_for(10**9, None) == 1


@settings(max_examples=100, deadline=None)
@given(documents, st.lists(st.integers(0, 4), max_size=14), shard_counts)
def test_longest_matches_and_maximal_spans(docs, text, shards) -> None:
    index, brute = both(docs, 2, shards)

    def longest(start: int) -> int:
        return max(
            n for n in range(len(text) - start + 1) if not n or brute.count(text[start : start + n])
        )

    lengths = [longest(i) for i in range(len(text))]
    assert index.longest_matches(text).tolist() == lengths
    assert index.longest_matches(text, 2).tolist() == [min(n, 2) for n in lengths]
    ranges = {(i, i + n) for i, n in enumerate(lengths) if n}
    inner = {r for r in ranges if any(o != r and o[0] <= r[0] and r[1] <= o[1] for o in ranges)}
    assert set(maximal(lengths)) == ranges - inner
    spans = index.attribute(text, min_length=2, documents=2)
    assert {(s.start, s.stop) for s in spans} == {r for r in ranges - inner if r[1] - r[0] >= 2}
    for span in spans:
        assert span.count == brute.count(text[span.start : span.stop])
        singles = [brute.count([t]) / index.tokens for t in text[span.start : span.stop]]
        assert math.isclose(span.unigram_logp, sum(map(math.log, singles)))
        for p in span.documents:
            assert p.ids[p.offset :][: span.stop - span.start] == text[span.start : span.stop]
    assert [s.unigram_logp for s in spans] == sorted(s.unigram_logp for s in spans)


def test_span_rules() -> None:
    index = Index.of([[1, 2, 3, 4, 5], [2, 3], [2, 3]])
    text = [1, 2, 3, 4, 5]

    def found(**options: object) -> list[tuple[int, int]]:
        return sorted((s.start, s.stop) for s in index.attribute(text, **options))

    assert found() == [(0, 5)]
    assert found(delimiters={3}) == [(0, 2), (3, 5)]
    assert found(word_starts={2, 4}) == [(1, 5)]
    assert found(max_count=2, delimiters={1, 4}) == [(4, 5)]  # 2 3 comes three times
    assert found(min_length=6) == []
    assert found(limit=1, delimiters={3}) == [(0, 2)] or found(limit=1, delimiters={3}) == [(3, 5)]


def test_novelty_is_what_no_long_match_covers() -> None:
    index = Index.of([[1, 2, 3, 4], [7, 8]])
    new = novelty(index, [1, 2, 3, 9, 7, 8], lengths=(2, 3, 4))
    assert np.allclose(new.uncovered, [1 / 6, 3 / 6, 1.0])
    assert math.isclose(new.index, (1 / 6 + 3 / 6 + 1) / 3)


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
    from forerun.ngrams import passages

    docs = [[1, 2], [1, 3]]
    plain = Index.of(docs)
    library = passages.Library(plain.library.starts, [], [], frozenset({1}))
    index = Index(plain.shards, library=library)
    shown = {p.document: p for p in index.search([1], limit=9)}
    assert shown[1].is_blocked and shown[1].ids == [] and shown[0].ids == [1, 2]


# the sheet's example, ends, unknown ids


def test_worked_example() -> None:
    index = Index.of(WORKED)
    shard = index.shards[0]
    assert (2 * unpack(shard.table, shard.width)).tolist() == [2, 8, 4, 14, 10, 6, 16, 18, 0, 12]
    assert index.count([2]) == 3 and index.count([2, 3]) == 2
    assert index.prob([2], 3).prob == 2 / 3
    after = index.ntd([1, 2])
    assert dict(zip(after.ids.tolist(), after.probs.tolist(), strict=True)) == {3: 0.5, END: 0.5}
    found = index.infgram_ntd([9, 1, 2, 3])
    assert found.suffix_length == 3 and found.ids.tolist() == [1] and found.is_sparse
    assert index.prob([7], 1).prob is None and index.prob([7], 1).context_count == 0


def test_the_end_id_stands_for_the_end_of_a_document() -> None:
    index = Index.of([[1, 2], [1, 2, 9, 3], [1, 2]], eos=9)
    assert index.prob([1, 2], 9).prob == 1.0  # also where the data ends
    assert index.ntd([1, 2]).ids.tolist() == [9]
    assert index.count([2, 9, 3]) == 1 and index.count([2, 9]) == 2


def test_ids_that_no_text_holds_match_nothing() -> None:
    index = Index.of(WORKED)
    for token in (-1, -2, 70_000, 1 << 40):
        assert index.count([token]) == index.count([2, token]) == 0
        assert index.infgram_ntd([token, 2]).suffix_length == 1
        assert index.longest_matches([2, token, 3]).tolist() == [1, 0, 1]
    with pytest.raises(DataError, match="list of token ids"):
        index.count(["a"])
    with pytest.raises(DataError, match="list of token ids"):
        index.count([[1], [2]])
    with pytest.raises(DataError, match="list of token ids"):
        index.count([1 << 80])


def test_what_cannot_be_asked_is_refused() -> None:
    index = Index.of(WORKED)
    with pytest.raises(ConfigError, match="max_support"):
        index.ntd([1], 0)
    with pytest.raises(ConfigError, match="empty query"):
        index.search([])
    with pytest.raises(ConfigError, match="clauses"):
        index.find_cnf([[]])
    with pytest.raises(ConfigError, match="empty term"):
        index.find_cnf([[[]]])
    with pytest.raises(ConfigError, match="no document 2"):
        index.document(2)
    with pytest.raises(DataError, match="width=4"):
        Index.of([[70_000]])
    with pytest.raises(DataError, match="got none"):
        Index.of([])


def test_many_threads_read_one_index() -> None:
    rng = np.random.default_rng(0)
    docs = [rng.integers(0, 20, 200).tolist() for _ in range(20)]
    index = Index.of(docs, shards=3)
    asked = [docs[i % 20][i : i + 3] for i in range(150)]
    expected = [(index.count(q), index.infgram_ntd(q).counts.tolist()) for q in asked]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            found = pool.map(
                lambda q: (index.count(q), index.infgram_ntd(q).counts.tolist()), asked
            )
            assert list(found) == expected


@settings(max_examples=150, deadline=None)
@given(documents, st.lists(queries, min_size=1, max_size=6), widths, st.integers(1, 4))
def test_fences_change_no_interval(docs, asked, width, step) -> None:
    """Also of queries that are longer than a fence, end in id 0, or hold what no text does."""
    (plain,) = Index.of(docs, width=width).shards
    fenced = shard_of(plain.text, step=step)
    plain = shard_of(plain.text, step=0)
    assert len(fenced.fences) == -(-len(plain.text) // step) and len(plain.fences) == 0
    end = separator(TYPES[width])
    asked += [[*q, 0] for q in asked] + [[*q, end] for q in asked] + [[1, -2], docs[0]]
    for query in asked:
        q = np.array(query, np.int64)
        assert searching.find(fenced, q, 0, len(q)) == searching.find(plain, q, 0, len(q)) or (
            Index([fenced]).count(q) == Index([plain]).count(q) == 0
        )
        lengths = [Index([s]).longest_matches(query).tolist() for s in (fenced, plain)]
        assert lengths[0] == lengths[1]
        assert Index([fenced]).infgram_ntd(query).ids.tolist() == (
            Index([plain]).infgram_ntd(query).ids.tolist()
        )


def test_fences_leave_few_ranks() -> None:
    """Of 20,000 ids an interval's edges are within 16 ranks each, whatever its length."""
    ids = np.random.default_rng(0).integers(0, 40, 20_000)
    (shard,) = Index.of([ids]).shards
    for query in ([7], [7, 3], [7, 3, 9], [1, 2, 3, 4]):
        q = np.array(query)
        a, b, c, d = narrow(shard, q, 0, len(q), 0, len(shard.text))
        left, right = searching.find(shard, q, 0, len(q))
        assert a <= left <= b and c <= right <= d
        assert b - a <= shard.step and d - c <= shard.step
