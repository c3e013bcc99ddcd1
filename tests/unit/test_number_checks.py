"""Numbers and token ids that are none are refused: fractions, NaN, negative values, zero sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forerun import registry
from forerun.bench import optimum
from forerun.constraints.corpus import Corpus
from forerun.constraints.infini import InfiniMix
from forerun.constraints.ngram_style import NgramStyle
from forerun.core.tree import IID, SWOR
from forerun.drafters.infini import Infini
from forerun.drafters.rest import Rest
from forerun.errors import ConfigError, DataError, ForerunError
from forerun.ngrams.index.build.build import Options as BuildOptions
from forerun.ngrams.index.counts.trie import NgramModel
from forerun.ngrams.index.fm.index import FMIndex
from forerun.ngrams.index.query.datastore import in_memory
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.index.query.interpolate import Removed, decontaminated
from forerun.retrieval.books import split
from forerun.retrieval.measures import accuracy, interval
from forerun.retrieval.seal import Options
from forerun.retrieval.token_beam import Free, beam_search
from forerun.retrieval.weights import weights as seal_weights
from forerun.utils.numbers import finite, token_ids, whole
from forerun.verifiers.reflective import Reflective

TEXT = [1, 2, 3, 1, 2, 4]
INDEX = Index.of([TEXT])
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


def model() -> NgramModel:
    return NgramModel.count([np.array(TEXT)], vocab_size=6)


def fm() -> FMIndex:
    return FMIndex.of([TEXT], 0)


@pytest.mark.parametrize("ids", [[1.5], [2.0], [1, 2.5], ["1"], "12", [[1]], [None], [math.nan], 3])
@pytest.mark.parametrize(
    "ask",
    [
        INDEX.count,
        INDEX.find,
        INDEX.infgram_ntd,
        INDEX.longest_matches,
        INDEX.attribute,
        INDEX.search,
        lambda ids: INDEX.count_many([[1], ids]),
        lambda ids: INDEX.infgram_many([ids, [1]]),
        lambda ids: INDEX.find_cnf([[[1]], [ids]]),
        lambda ids: Index.of([TEXT, ids]),
        lambda ids: fm().count(ids),
        lambda ids: FMIndex.of([TEXT, ids], 0),
        lambda ids: NgramModel.count([ids], vocab_size=6),
        lambda ids: model().row(ids),
        lambda ids: model().knows(ids),
        lambda ids: in_memory([ids], None),
        token_ids,
    ],
)
def test_what_is_no_list_of_ids_is_refused(ask: Callable[[Any], Any], ids: Any) -> None:
    with pytest.raises((ForerunError, TypeError)) as refusal:
        ask(ids)
    assert isinstance(refusal.value, ForerunError) or ids == 3


def test_ids_of_every_integer_type_are_taken() -> None:
    for ids in ([1, 2], (1, 2), np.array([1, 2], np.uint8), np.array([1, 2], np.uint64)):
        assert INDEX.count(ids) == INDEX.count_many([ids])[0] == fm().count(ids) == 2
    assert INDEX.count([]) == INDEX.tokens and token_ids(range(3)).tolist() == [0, 1, 2]
    with pytest.raises(DataError):
        token_ids(np.array([2**64 - 1], np.uint64))


def test_a_negative_id_is_named_itself() -> None:
    for ids, wrong in (([-1, 5], -1), ([5, -7, 9], -7), ([3, 9], 9)):
        with pytest.raises(DataError, match=f"has token id {wrong},"):
            NgramModel.count([np.array(ids)], vocab_size=6)
    with pytest.raises(ConfigError, match="got -1"):
        optimum.best_acceptance(P, Q, 1, SWOR, (-1,))


BAD_COUNTS = (-1, 1.5, math.nan, "2", None)
BAD_SIZES = (0, *BAD_COUNTS)


@pytest.mark.parametrize("value", BAD_SIZES)
@pytest.mark.parametrize(
    "ask",
    [
        lambda n: INDEX.search([1], window=n),
        lambda n: INDEX.search([1], limit=n),
        lambda n: INDEX.document(0, window=n),
        lambda n: INDEX.find_cnf([[[1]]], max_clause_freq=n),
        lambda n: INDEX.attribute([1], min_length=n),
        lambda n: Index.of([TEXT], shards=n),
        lambda n: FMIndex.of([TEXT], 0, sample=n),
        lambda n: NgramModel.count([np.array(TEXT)], vocab_size=6, order=n),
        lambda n: NgramModel.count([np.array(TEXT)], vocab_size=n),
        lambda n: list(decontaminated([TEXT], [TEXT], Removed(), length=n)),
        lambda n: Index.of([TEXT], threads=n),
        lambda n: BuildOptions(shards=n),
        lambda n: BuildOptions(workers=n),
        lambda n: accuracy([1, 2], {1}, n),
        lambda n: interval([0.5, 1.0], draws=n),
        lambda n: split(n, 0),
        lambda n: seal_weights(np.zeros(1), np.ones(1), n),
        lambda n: beam_search(None, [[1]], Free(3), beams=n),
        lambda n: beam_search(None, [[1]], Free(3), length=n),
        lambda n: Infini(index=INDEX, context=n),
        lambda n: Infini(index=INDEX, max_support=n),
        lambda n: InfiniMix(INDEX, context=n),
        lambda n: Reflective(leaves=n),
        lambda n: NgramStyle(model(), entries=n),
        lambda n: Options(beams=n),
        lambda n: Options(length=n),
        lambda n: whole("n", n),
    ],
)
def test_sizes_are_whole_and_at_least_one(ask: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        ask(value)


@pytest.mark.parametrize("name", ["longest", "shortest", "tokens", "most", "reads"])
def test_sizes_of_rest_are_whole(name: str) -> None:
    for value in (0, 2.5):
        with pytest.raises(ConfigError):
            Rest(index=INDEX, **{name: value})


@pytest.mark.parametrize("value", (0, -1, 1.5, math.nan, "2"))
def test_optional_sizes_are_whole(value: Any) -> None:
    with pytest.raises(ConfigError):
        Corpus(fm(), window=value)
    with pytest.raises(ConfigError):
        INDEX.ntd([1], value)


@pytest.mark.parametrize("value", BAD_COUNTS)
@pytest.mark.parametrize(
    "ask",
    [
        lambda n: INDEX.document(n),
        lambda n: INDEX.find_cnf([[[1]], [[2]]], max_diff_tokens=n),
        lambda n: INDEX.attribute([1], documents=n),
        lambda n: INDEX.longest_matches([1], n),
        lambda n: INDEX.search([1], seed=n),
        lambda n: optimum.with_replacement(P, Q, n),
        lambda n: optimum.without_replacement(P, Q, n),
        lambda n: optimum.greedy(P, Q, n),
    ],
)
def test_counts_are_whole_and_at_least_zero(ask: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        ask(value)


@pytest.mark.parametrize("document", [-1, 1, 1.5, 0.0, math.nan])
def test_a_document_of_an_fm_index_is_a_whole_number_in_range(document: Any) -> None:
    with pytest.raises(DataError, match="there is no document"):
        fm().extract(document)
    with pytest.raises(DataError):
        fm().text(0, 1.5)


def test_no_draft_is_accepted_of_none() -> None:
    for of in (optimum.greedy, optimum.with_replacement, optimum.without_replacement):
        assert of(P, Q, 0) == 0.0
        assert 0 < of(P, Q, 1) < of(P, Q, 2) <= 1
    assert optimum.greedy(P, Q, 1) == pytest.approx(np.minimum(P, Q).sum())
    assert optimum.best_acceptance(P, Q, 0, SWOR, (0,)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "law",
    [
        np.array([0.5, math.nan, 0.5]),
        np.array([math.inf, 0, 0]),
        np.array([1.2, -0.2, 0.0]),
        np.zeros(3),
        np.array([]),
        np.ones((1, 3)),
    ],
)
def test_what_is_no_distribution_has_no_optimum(law: np.ndarray) -> None:
    for of in (optimum.greedy, optimum.with_replacement, optimum.without_replacement):
        for p, q in ((law, Q), (P, law)):
            with pytest.raises(ConfigError, match="finite probabilities"):
                of(p, q, 2)
    for law_of in (IID, SWOR):
        with pytest.raises(ConfigError, match="one length"):
            optimum.best_acceptance(P, np.ones(4), 2, law_of)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, None, "x"])
def test_weights_of_a_style_are_finite(value: Any) -> None:
    for weights in ((0.5, value), (value,), ()):
        with pytest.raises(ConfigError, match="weight"):
            NgramStyle(model(), weights=weights)
        with pytest.raises(ConfigError, match="weight"):
            model().mixture([1], 2, weights=weights)
        with pytest.raises(ConfigError, match="weight"):
            model().shares([1], np.array([2]), weights)
    for smoothing in (value, 0.0):
        with pytest.raises(ConfigError, match="smoothing"):
            NgramStyle(model(), smoothing=smoothing)
    with pytest.raises(ConfigError, match="strength"):
        NgramStyle(model(), strength=value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_numbers_of_a_passage_search_are_finite(value: float) -> None:
    for name in ("alpha", "beta", "smoothing"):
        with pytest.raises(ConfigError, match=name):
            Options(**{name: value})
    with pytest.raises(ConfigError, match="share"):
        list(decontaminated([TEXT], [TEXT], Removed(), share=value))


@pytest.mark.parametrize("values", [[], [math.nan], [[1.0]]])
def test_an_interval_needs_values(values: Any) -> None:
    with pytest.raises(DataError, match="finite values"):
        interval(values)


def test_reflective_refuses_itself_as_rule() -> None:
    for rule in ("reflective", "reflective:weight=0.1"):
        with pytest.raises(ConfigError, match="is reflective itself"):
            registry.make("verifier", "reflective", rule=rule)
    with pytest.raises(ConfigError, match="weight"):
        Reflective(weight=math.nan)
    assert Reflective(leaves=2).leaves == 2


def test_checks_return_plain_numbers() -> None:
    assert whole("n", np.int64(3), 1, 3) == 3 and type(whole("n", np.int8(1))) is int
    assert finite("x", np.float32(0.5), 0, 1) == 0.5 and finite("x", 2) == 2.0
    for value in (True, 4, "1"):
        with pytest.raises(ConfigError, match="n must be a whole number from 1 to 3"):
            whole("n", value, 1, 3)
    with pytest.raises(ConfigError, match=r"x must be in \(0, 1\], got 0"):
        finite("x", 0, 0, 1, is_open=True)
