"""Every query of an index against brute force over the documents."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from brute import both, documents, queries, shard_counts, widths
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build.shards import shard_of
from forerun.ngrams.index.build.sparse_index import narrow
from forerun.ngrams.index.build.suffix_array import TYPES, separator, unpack
from forerun.ngrams.index.query import kernels
from forerun.ngrams.index.query.attribution import maximal, novelty
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.index.query.results import unit_for

WORKED = [[1, 2, 3, 1, 2], [2, 3, 4]]
END = 65535


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
    for many in (5, None, [5], ["a"]):
        with pytest.raises(DataError, match="list"):
            index.count_many(many)


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
        assert kernels.find(fenced, q, 0, len(q)) == kernels.find(plain, q, 0, len(q)) or (
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
        left, right = kernels.find(shard, q, 0, len(q))
        assert a <= left <= b and c <= right <= d
        assert b - a <= shard.step and d - c <= shard.step
