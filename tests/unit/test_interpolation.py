"""Neural and n-gram laws mixed: weights that are fitted, features, decontamination."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from index_files import IDS, write_lines

from forerun.constraints.infini import InfiniMix
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build.build import build
from forerun.ngrams.index.query import interpolate
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.index.query.interpolate import (
    LENGTHS,
    Cases,
    Forest,
    Removed,
    TwoWeights,
    cases_of,
    decontaminated,
)
from forerun.state import array_file


def random_cases(count: int = 4000, seed: int = 0) -> Cases:
    """The corpus is right where the suffix is long, the model where it is short."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((count, 2 + LENGTHS), np.float32)
    rows[:, 0] = rng.random(count) < 0.5
    rows[:, 1] = rng.integers(0, 12, count)
    is_long = rows[:, 1] >= 6
    corpus = np.where(rng.random(count) < np.where(is_long, 0.9, 0.2), 1.0, 0.0)
    return Cases(rng.uniform(0.05, 0.5, count), corpus, rows)


def test_cases_are_what_the_index_says() -> None:
    index = Index.of([[1, 2, 3, 1, 2], [2, 3, 4]])
    contexts, tokens = [[9, 1, 2, 3], [1, 2], [7]], [1, 3, 2]
    cases, found = cases_of(index, contexts, tokens, np.array([0.1, 0.2, 0.3]))
    assert cases.corpus.tolist() == [1.0, 0.5, 3 / 10]
    assert [f.suffix_length for f in found] == [3, 2, 0]
    rows = cases.features
    assert rows[:, 0].tolist() == [1, 0, 0] and rows[:, 1].tolist() == [3, 2, 0]
    expected = np.log1p([index.count([3]), index.count([2, 3]), index.count([1, 2, 3])])
    assert np.allclose(rows[0, 2:5], expected) and not rows[0, 5:].any() and not rows[2, 2:].any()
    assert interpolate.probs_of(found, [4, 9, 9]).tolist() == [0, 0, 0]


def test_fitted_weights_are_the_best_ones() -> None:
    cases = random_cases()
    best = TwoWeights.fit(cases)
    least = cases.perplexity(best)
    for w in np.linspace(0, 0.99, 34):
        assert least <= cases.perplexity(TwoWeights(w, best.other)) + 1e-9
        assert least <= cases.perplexity(TwoWeights(best.sparse, w)) + 1e-9
    assert least < cases.perplexity() and least < cases.perplexity(TwoWeights(1.0, 1.0))


def test_useless_and_perfect_corpora_get_the_ends() -> None:
    neural, rows = np.full(50, 0.3), np.zeros((50, 2 + LENGTHS), np.float32)
    assert TwoWeights.fit(Cases(neural, np.zeros(50), rows)) == TwoWeights(0, 0)
    perfect = TwoWeights.fit(Cases(neural, np.ones(50), rows))
    assert perfect.other > 1 - 1e-9
    with pytest.raises(DataError, match="got none"):
        TwoWeights.fit(Cases(neural[:0], neural[:0], rows[:0]))
    with pytest.raises(ConfigError, match="must be in"):
        TwoWeights(0.5, 1.1)


def test_a_forest_sees_what_two_weights_cannot(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    cases, others = random_cases(), random_cases(seed=1)
    forest = Forest.fit(cases, trees=20)
    weights = forest(others.features)
    is_long = others.features[:, 1] >= 6
    assert ((weights >= 0) & (weights <= 1)).all()
    assert weights[is_long].mean() > 0.7 > 0.3 > weights[~is_long].mean()
    assert others.perplexity(forest) < others.perplexity(TwoWeights.fit(cases)) - 0.1
    forest.save(tmp_path / "forest")
    assert np.array_equal(Forest.load(tmp_path / "forest")(others.features), weights)


def test_compiled_trees_answer_as_scikit_learn() -> None:
    ensemble = pytest.importorskip("sklearn.ensemble", reason="scikit-learn is not installed")
    cases = random_cases(800)
    made = ensemble.RandomForestRegressor(10, random_state=3).fit(cases.features, cases.corpus)
    ours = Forest(interpolate._flat([tree.tree_ for tree in made.estimators_]))
    rows = random_cases(500, seed=2).features
    assert np.allclose(ours(rows), made.predict(rows), atol=1e-12)


def stump() -> Forest:
    """Weight 0.9 for suffixes of 2 tokens or more, 0.1 for others."""
    told = {
        "roots": [0],
        "left": [1, -1, -1],
        "right": [2, -1, -1],
        "feature": [1, -2, -2],
        "threshold": [1.5, -2, -2],
        "value": [0.5, 0.1, 0.9],
    }
    types = {"threshold": np.float64, "value": np.float64}
    return Forest({k: np.array(v, types.get(k, np.int64)) for k, v in told.items()})


def test_a_forest_weighs_in_a_shaper(tmp_path: Path) -> None:
    stump().save(tmp_path / "forest")
    shaper = InfiniMix(Index.of([[0, 1, 2, 0, 1]]), Forest.load(tmp_path / "forest"))
    flat = np.zeros(3)
    for context, w in (((0, 1), 0.9), ((5, 1), 0.1)):
        mixed = np.exp(shaper.logits(context, flat))
        assert np.allclose(mixed, [(1 - w) / 3, (1 - w) / 3, (1 - w) / 3 + w])
    whole, _ = array_file.read(tmp_path / "forest")
    array_file.write(tmp_path / "old", replace(whole, settings={"lengths": 3}), array_file.Origin())
    with pytest.raises(DataError, match="other features"):
        Forest.load(tmp_path / "old")


def test_shapers_refuse_what_cannot_work(tmp_path: Path) -> None:
    index = Index.of([[0, 1, 7]])
    with pytest.raises(ConfigError, match="has token id 7, but the ids of this model end at 3"):
        InfiniMix(index).logits((1,), np.zeros(4))
    with pytest.raises(ConfigError, match="at least 1"):
        InfiniMix(index, context=0)
    build(tmp_path / "ix", [write_lines(tmp_path / "n.jsonl", [{"tokens": [1, 2]}])], IDS)
    seq = Sequence([5, 1], 2, Sampling(), None, limit=3)  # type: ignore[arg-type]
    shaper = InfiniMix(tmp_path / "ix", TwoWeights(1, 1), context=1)
    assert shaper.start(seq) == (1,) and shaper.advance((1,), 2) == (2,)
    assert np.argmax(shaper.logits((1,), np.zeros(5))) == 2


def test_documents_of_the_evaluation_are_left_out_and_counted() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50, 200).tolist()
    other = rng.integers(0, 50, 100).tolist()
    copied, half, short = text[20:90], text[:60] + other[:60], text[5:9]
    documents = [other, copied, half, short, [], [51]]
    removed = Removed()
    kept = list(decontaminated(documents, [text], removed))
    assert kept == [other, half, [], [51]]
    assert removed == Removed(2, 74, 6, 100 + 70 + 120 + 4 + 1)
    strict = Removed()
    assert list(decontaminated(documents, [text], strict, share=0.01)) == [other, [], [51]]
    # 13-grams of `half` that stand in the text: 48 of 108
    edge = Removed()
    assert half not in list(decontaminated([half], [text], edge, share=48 / 108))
    assert half in list(decontaminated([half], [text], edge, share=49 / 108))
    with pytest.raises(ConfigError, match="share"):
        next(decontaminated(documents, [text], removed, share=0.0))
