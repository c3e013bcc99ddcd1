"""Counts of n-grams against a dictionary, their files, and what follows from them."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError, DataError
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.index.counts.trie import NgramModel, is_saved

TEXTS = st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=4).filter(any)


def counted(texts: list[list[int]], order: int = 3, vocab: int = 5) -> NgramModel:
    return NgramModel.count(
        [np.array(t, dtype=np.int32) for t in texts], vocab_size=vocab, order=order
    )


@settings(deadline=None)  # kernels compile
@given(texts=TEXTS, order=st.integers(1, 5))
def test_rows_are_the_counts_of_a_dictionary(texts: list[list[int]], order: int) -> None:
    model = counted(texts, order)
    for length in range(1, order + 1):
        ngrams = [tuple(t[i : i + length]) for t in texts for i in range(len(t) - length + 1)]
        contexts = {g[:-1] for g in ngrams}
        for context in contexts:
            row = model.row(context)
            assert row is not None
            wanted = Counter(g[-1] for g in ngrams if g[:-1] == context)
            assert row.ids.tolist() == sorted(wanted)
            assert dict(zip(row.ids.tolist(), row.counts.tolist(), strict=True)) == wanted
        assert all(model.knows(g) for g in ngrams)
    assert len(model) == sum(
        len({tuple(t[i : i + n]) for t in texts for i in range(len(t) - n + 1)})
        for n in range(1, order + 1)
    )


def test_unknown_contexts_have_no_row() -> None:
    model = counted([[0, 1, 2], [2]])
    assert model.row([3]) is None
    assert model.row([1, 2]) is None  # it ends its document
    assert model.row([0, 1, 2]) is None  # longer than the model looks
    assert not model.knows([2, 2])  # no n-gram crosses a border


@settings(deadline=None)  # kernels compile
@given(texts=TEXTS)
def test_smoothed_laws_sum_to_one_and_mixtures_are_probabilities(texts: list[list[int]]) -> None:
    model = counted(texts)
    for context in [(), (1,), (2, 1), (4, 4)]:
        law = model.probs(context)
        if law is not None:
            assert law.sum() == pytest.approx(1, abs=1e-12)
        mixed = [model.mixture(context, x) for x in range(5)]
        assert sum(mixed) == pytest.approx(1, abs=1e-12)
        assert all(0 < p <= 1 and math.isfinite(math.log(p)) for p in mixed)


def test_the_mixture_is_that_of_the_orders_that_match() -> None:
    model = counted([[0, 1, 2, 0, 1, 3]])
    k, v = 1e-3, 5
    one = (1 + k) / (6 + k * v)
    two = (1 + k) / (2 + k * v)
    assert model.mixture((0, 1), 2) == pytest.approx(0.1 * one + 0.3 * two + 0.6 * two)
    assert model.mixture((4, 1), 2) == pytest.approx((0.1 * one + 0.3 * two) / 0.4)
    assert model.mixture((), 2) == pytest.approx(one)
    assert model.mixture((4,), 2, weights=(0.0, 1.0)) == 1 / v  # no order has an estimate


def test_perplexity_is_lower_in_text_of_the_kind_that_was_counted() -> None:
    rng = np.random.default_rng(0)
    steps = np.array([1, 1, 1, 2])
    walk = np.cumsum(rng.choice(steps, 400)) % 5
    model = counted([walk[:300].tolist()])
    own, other = walk[300:].tolist(), rng.integers(0, 5, 100).tolist()
    assert model.perplexity(own) < 3 < model.perplexity(other)
    by_hand = np.mean([math.log(model.mixture(own[max(0, i - 2) : i], own[i])) for i in (5, 6)])
    assert model.perplexity(own[:7], 5) == pytest.approx(math.exp(-by_hand))
    with pytest.raises(DataError, match="at least one token"):
        model.perplexity([1], 1)


def test_a_saved_model_is_the_same(tmp_path: Path, tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    text = tmp_path / "a.txt"
    text.write_text("some text and some other text\n")
    model = NgramModel.of_files([text], tokenizer, order=4)
    model.save(tmp_path / "a.ngrams")
    assert is_saved(tmp_path / "a.ngrams") and not is_saved(text)
    again = NgramModel.of_files([tmp_path / "a.ngrams"], tokenizer)
    for name in ("tokens", "counts", "first"):
        assert np.array_equal(getattr(model, name), getattr(again, name))
    assert (again.order, again.vocab_size) == (4, tokenizer.vocab_size)


def test_files_of_another_tokenizer_are_refused(tmp_path: Path, tiny_folder: Path) -> None:
    model = counted([[0, 1]])
    other = NgramModel(model.tokens, model.counts, model.first, 3, 5, tokenizer="f" * 64)
    other.save(tmp_path / "b.ngrams")
    with pytest.raises(DataError, match="another tokenizer.*count the text again"):
        NgramModel.load(tmp_path / "b.ngrams", Tokenizer.load(tiny_folder))


def test_bad_corpora_are_refused(tmp_path: Path, tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    empty, blank, latin = (tmp_path / f"{name}.txt" for name in ("empty", "blank", "latin"))
    empty.write_text("")
    blank.write_text("\n \n\n")
    latin.write_bytes(b"one\ntwo\nthr\xe9e\n")
    for file in (empty, blank):
        with pytest.raises(DataError, match=r"corpus is empty or blank.*give a file"):
            NgramModel.of_files([file], tokenizer)
    with pytest.raises(DataError, match=r"latin.txt, line 3, is not UTF-8"):
        NgramModel.of_files([latin], tokenizer)
    with pytest.raises(DataError, match=r"cannot be read: No such file or directory; check it"):
        NgramModel.of_files([tmp_path / "none.txt"], tokenizer)
    with pytest.raises(ConfigError, match="needs the target's tokenizer"):
        NgramModel.of_files([latin], None)
    with pytest.raises(ConfigError, match=r"order .*from 1 to 16, got 0"):
        counted([[1]], order=0)
    with pytest.raises(DataError, match="token id 9, the model.s ids are 0 to 4"):
        counted([[9]])
