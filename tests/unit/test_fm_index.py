"""The FM-index against brute force and against the suffix array; its file; what it refuses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.fm import wavelet
from forerun.ngrams.index.fm.index import FMIndex
from forerun.ngrams.index.query.engine import Index

END = 7
ids = st.integers(0, 4)
corpora = st.lists(st.lists(ids, min_size=1, max_size=12), min_size=1, max_size=5)
samples = st.sampled_from([1, 2, 3, 32])
QUICK = settings(max_examples=60, deadline=None)


def text_of(documents: list[list[int]]) -> list[int]:
    return [END, *(t for document in documents for t in [*document, END])]


def places(text: list[int], pattern: list[int]) -> list[int]:
    m = len(pattern)
    return [i for i in range(len(text) - m + 1) if text[i : i + m] == pattern]


@QUICK
@given(st.lists(st.integers(0, 70_000), max_size=60), st.data())
def test_wavelet_is_counting(given_: list[int], data: st.DataObject) -> None:
    n = len(given_)
    made = wavelet.make(np.array(given_, np.uint32), 17)
    assert [wavelet.access(made, i)[0] for i in range(n)] == given_
    left = data.draw(st.integers(0, n))
    right = data.draw(st.integers(left, n))
    part = given_[left:right]
    found, counts = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    size = wavelet.symbols(made, left, right, found, counts)
    counted = sorted(Counter(part).items())
    assert list(zip(found[:size].tolist(), counts[:size].tolist(), strict=True)) == counted
    for symbol in {*part, 5}:
        first, _ = wavelet.descend(made, symbol, 0, 0)
        a, b = wavelet.descend(made, symbol, left, right)
        assert (a - first, b - a) == (given_[:left].count(symbol), part.count(symbol))


def test_bits_across_blocks() -> None:
    bits = np.random.default_rng(0).integers(0, 2, 3 * wavelet.BITS + 5)
    blocks = wavelet.empty_blocks(1, len(bits))[0]
    for i in np.flatnonzero(bits).tolist():
        wavelet.set_bit(blocks, i)
    wavelet.count_blocks(blocks)
    assert blocks.ctypes.data % 64 == 0
    sums = np.concatenate([[0], np.cumsum(bits)])
    assert [wavelet.ones(blocks, i) for i in range(len(bits) + 1)] == sums.tolist()
    assert [wavelet.is_set(blocks, i) for i in range(len(bits))] == bits.astype(bool).tolist()


@QUICK
@given(corpora, samples, st.lists(st.one_of(ids, st.just(END)), max_size=4))
def test_queries_are_brute_force(
    documents: list[list[int]], sample: int, pattern: list[int]
) -> None:
    index, text = FMIndex.of(documents, END, sample=sample), text_of(documents)
    found = places(text, pattern) if pattern else list(range(len(text) + 1))
    rows = index.find(pattern)
    assert index.count(pattern) == len(found)
    assert sorted((index.locate(rows) - len(pattern)).tolist()) == found
    after = Counter(text[i + len(pattern)] for i in found if i + len(pattern) < len(text))
    tokens, counts = index.next(pattern)
    assert list(zip(tokens.tolist(), counts.tolist(), strict=True)) == sorted(after.items())
    is_last = bool(found) and found[-1] + len(pattern) == len(text)
    assert counts.sum() + is_last == len(found)
    for token, count in after.items():
        assert index.count([*pattern, token]) == count
        assert index.extend(rows, token) == index.find([*pattern, token])


@QUICK
@given(corpora, samples)
def test_documents_come_back(documents: list[list[int]], sample: int) -> None:
    index, text = FMIndex.of(documents, END, sample=sample), np.array(text_of(documents))
    assert [index.extract(i).tolist() for i in range(len(documents))] == documents
    assert index.text(0, index.length).tolist() == text.tolist()
    owner = np.minimum(np.cumsum(text == END) - 1, len(documents) - 1)
    assert index.document_of(np.arange(len(text))).tolist() == owner.tolist()


@QUICK
@given(corpora, st.lists(ids, min_size=1, max_size=4))
def test_it_answers_as_the_suffix_array_does(documents: list[list[int]], query: list[int]) -> None:
    fm, array = FMIndex.of(documents, END), Index.of(documents, eos=END)
    assert fm.count(query) == array.count(query)
    tokens, counts = fm.next(query)
    follow = array.ntd(query, max_support=None)
    assert tokens.tolist() == sorted(follow.ids.tolist())
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == dict(
        zip(follow.ids.tolist(), follow.counts.tolist(), strict=True)
    )


def test_many_ids_and_a_real_size(tmp_path: Path) -> None:
    """Ids up to 2 ** 17, several blocks, patterns of the text; the file gives the same answers."""
    rng = np.random.default_rng(0)
    known = rng.choice(1 << 17, 3000, replace=False)
    documents = [known[rng.zipf(1.3, 400) % 3000] for _ in range(20)]
    fm = FMIndex.of(documents, 1 << 17, tokenizer="one")
    array = Index.of(documents, width=4, eos=1 << 17)
    fm.save(tmp_path / "a.fm")
    again = FMIndex.load(tmp_path / "a.fm", "one")
    assert again.bytes_per_token == fm.bytes_per_token < 4
    for number, document in enumerate(documents):
        at, size = int(rng.integers(390)), int(rng.integers(1, 5))
        query = document[at : at + size]
        for index in (fm, again):
            assert index.count(query) == array.count(query) > 0
            assert index.next(query)[0].tolist() == sorted(array.ntd(query, None).ids.tolist())
            assert (index.extract(number) == document).all()
        assert (again.locate(again.find(query)) == fm.locate(fm.find(query))).all()


def test_what_no_text_holds() -> None:
    index = FMIndex.of([[1, 2, 3]], END)
    for pattern in ([9], [-1], [1, 1 << 40], [3, 2]):
        assert index.count(pattern) == 0 and len(index.next(pattern)[0]) == 0
    assert index.extend(index.find([1]), 99) == (0, 0)
    with pytest.raises(DataError, match="list of token ids"):
        index.count(["a"])
    with pytest.raises(DataError, match="there is no document 1"):
        index.extract(1)
    with pytest.raises(DataError, match="range"):
        index.text(0, 99)


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ([], "expected documents to index, got none"),
        ([[1], []], "document 1 is empty"),
        ([[1, END]], "without eos="),
        ([[1, -3]], "expected ids in"),
        ([[1 << 24]], "expected ids in"),
        ([["x"]], "list of token ids"),
    ],
)
def test_documents_that_cannot_be_indexed(documents: list, says: str) -> None:
    with pytest.raises(DataError, match=says):
        FMIndex.of(documents, END)


def test_files_that_are_not_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "a.fm"
    FMIndex.of([[1, 2, 3] * 50], END, tokenizer="one").save(file)
    whole = file.read_bytes()
    with pytest.raises(ConfigError, match="tokenizer of another vocabulary"):
        FMIndex.load(file, "two")
    flipped = bytearray(whole)
    flipped[-40] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(DataError, match="altered or damaged"):
        FMIndex.load(file)
    file.write_bytes(whole[:-100])
    with pytest.raises(DataError, match="cut off"):
        FMIndex.load(file)
    with pytest.raises(DataError, match="no file"):
        FMIndex.load(tmp_path / "b.fm")
    with pytest.raises(ConfigError, match="sample"):
        FMIndex.of([[1]], END, sample=0)
