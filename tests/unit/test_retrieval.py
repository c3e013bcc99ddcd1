"""Retrieval from a suffix array: intervals and counts against brute force over the documents."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ngrams.index.query import continuations as retrieval
from forerun.ngrams.index.query.continuation_kernels import FirstTokens, TreeLimits, continuations
from forerun.ngrams.index.query.continuations import Continuations, retrieve
from forerun.ngrams.index.query.engine import Index

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4)
EOS = 3  # an id like others in most tests


def paths_of(found: Continuations) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens.tolist(), found.parents.tolist(), strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def counted(documents: list[list[int]], text: list[int], depth: int, lengths: tuple[int, int]):
    """The longest suffix that something follows, its places, and counts of what follows."""
    for length in range(min(lengths[1], len(text)), lengths[0] - 1, -1):
        suffix, counts, places = text[len(text) - length :], Counter(), 0
        for doc in documents:
            for at in range(len(doc) - length + 1):
                if doc[at : at + length] == suffix:
                    places += 1
                    after = doc[at + length : at + length + depth]
                    counts.update(tuple(after[: k + 1]) for k in range(len(after)))
        if counts:
            return length, places, counts
    return 0, 0, Counter()


def best(counts: Counter, nodes: int, weights: dict[int, float] | None = None):
    """The sheet's order: most frequent, then shorter, then the lower id."""
    kept = [p for p in counts if weights is None or p[0] in weights]
    scores = {p: counts[p] * (weights[p[0]] if weights else 1) for p in kept}
    return sorted((-scores[p], len(p), p[-1]) for p in kept)[:nodes]


@settings(max_examples=200, deadline=None)
@given(
    documents=DOCUMENTS,
    text=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    nodes=st.integers(1, 20),
    depth=st.integers(1, 4),
    shortest=st.integers(1, 2),
)
def test_counts_are_those_of_all_continuations(documents, text, nodes, depth, shortest) -> None:
    found = retrieve(Index.of(documents), text, TreeLimits(nodes, depth), lengths=(shortest, 4))
    length, places, counts = counted(documents, text, depth, (shortest, 4))
    assert (found.match, found.places) == (length, places)
    paths = paths_of(found)
    assert len(set(paths)) == len(paths) == min(nodes, len(counts))
    assert found.counts.tolist() == [counts[p] for p in paths]
    keys = [(-counts[p], len(p), p[-1]) for p in paths]
    assert keys == best(counts, nodes)


@settings(max_examples=100, deadline=None)
@given(
    documents=DOCUMENTS,
    text=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    nodes=st.integers(1, 12),
    weights=st.dictionaries(st.integers(0, 5), st.sampled_from([0.125, 0.25, 0.5, 2.0])),
)
def test_only_allowed_first_tokens_and_weighted(documents, text, nodes, weights) -> None:
    firsts = FirstTokens(np.array([*weights], np.int64), np.array([*weights.values()], float))
    found = retrieve(Index.of(documents), text, TreeLimits(nodes, 3), lengths=(1, 4), firsts=firsts)
    _, _, counts = counted(documents, text, 3, (1, 4))
    paths = paths_of(found)
    keys = [(-counts[p] * weights[p[0]], len(p), p[-1]) for p in paths]
    assert keys == best(counts, nodes, weights)


def test_long_matches_bypass_the_pruning() -> None:
    index = Index.of([[1, 2, 3, 4, 5]])
    firsts = FirstTokens(np.array([9], np.int64), np.ones(1))
    assert paths_of(retrieve(index, [1, 2, 3], TreeLimits(4, 2), firsts=firsts)) == []
    long = retrieve(index, [1, 2, 3], TreeLimits(4, 2), firsts=firsts, bypass=3)
    assert paths_of(long) == [(4,), (4, 5)]
    assert paths_of(retrieve(index, [1, 2, 3], TreeLimits(4, 2), firsts=firsts, bypass=4)) == []


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_add_up(shards: int) -> None:
    rng = np.random.default_rng(shards)
    documents = rng.integers(0, 3, (9, 20)).tolist()
    one, many = Index.of(documents), Index.of(documents, shards=shards)
    for text in rng.integers(0, 3, (20, 4)).tolist():
        a, b = (retrieve(index, text, TreeLimits(200, 3)) for index in (one, many))
        assert a.match == b.match and a.places == b.places
        found = [dict(zip(paths_of(f), f.counts.tolist(), strict=True)) for f in (a, b)]
        assert found[0] == found[1]
        assert a.counts.tolist() == b.counts.tolist()


def test_the_end_of_a_document_is_the_end_id_and_nothing_follows_it() -> None:
    documents = [[1, 2], [1, 2], [1, 2, 3], [4]]
    with_end = retrieve(Index.of(documents, eos=9), [1, 2], TreeLimits(8, 3), lengths=(1, 4))
    assert dict(zip(paths_of(with_end), with_end.counts.tolist(), strict=True)) == {
        (9,): 2,
        (3,): 1,
        (3, 9): 1,
    }
    without = retrieve(Index.of(documents), [1, 2], TreeLimits(8, 3), lengths=(1, 4))
    assert paths_of(without) == [(3,)]
    allowed = FirstTokens(np.array([9], np.int64), np.ones(1))
    named = retrieve(Index.of(documents, eos=9), [1, 2], TreeLimits(8, 3), firsts=allowed)
    assert paths_of(named) == [(9,)] and named.counts.tolist() == [2]


def test_rare_continuations_may_be_missed_but_never_miscounted() -> None:
    rng = np.random.default_rng(0)
    document = [t for _ in range(3000) for t in (1, int(rng.zipf(1.4)) % 500 + 2)]
    index = Index.of([document])
    _, places, counts = counted([document], [1], 2, (1, 1))
    for reads in (16, 64, 256):
        found = retrieve(index, [1], TreeLimits(64, 2, reads), lengths=(1, 1))
        paths = paths_of(found)
        assert found.counts.tolist() == [counts[p] for p in paths]
        frequent = {p for p in counts if len(p) == 1 and counts[p] > places / reads}
        assert set(sorted(frequent, key=lambda p: -counts[p])[:20]) <= set(paths)


def test_warm_up_compiles_for_this_index() -> None:
    retrieval.warm_up(Index.of([[1, 2, 3]]))
    assert continuations.signatures
