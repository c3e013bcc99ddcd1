"""SEAL on small passages: beams, weights, credit, ranking, the generator, what is refused."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from forerun.errors import CapacityError, ConfigError, DataError, UnknownName
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.index.fm.index import FMIndex
from forerun.retrieval import measures
from forerun.retrieval.generator import Generator
from forerun.retrieval.passages import (
    BODY,
    TITLE_END,
    Passage,
    PassageIndex,
    read_passages,
    write_passages,
)
from forerun.retrieval.ranking import Grams, Hits, first_stage, full_score, occurrences
from forerun.retrieval.seal import IndexGuide, Options, Seal, top_ngrams
from forerun.retrieval.token_beam import Free, beam_search
from forerun.retrieval.weights import cover, weights
from forerun.training.language_model import Size, build_model
from forerun.training.recipes.seal import make_tokenizer

PASSAGES = [
    Passage(
        "The red fox", "A red fox ran over the hill. It saw a hen and a dog near the old mill."
    ),
    Passage(
        "The old mill",
        "The mill stood by the river. Its wheel turned all day, and the miller slept.",
    ),
    Passage("A long night", "Rain fell all night. The river rose, and the miller lost his wheel."),
]


class Table:
    """A scorer whose log-probabilities depend on the last token alone."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.logps = np.log(np.random.default_rng(seed).dirichlet(np.ones(size), size))

    def begin(self, prompts: Many[Many[int]]) -> tuple[None, np.ndarray]:
        return None, self.logps[[prompt[-1] for prompt in prompts]]

    def go_on(self, state: None, rows: np.ndarray, tokens: np.ndarray) -> tuple[None, np.ndarray]:
        return None, self.logps[tokens]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_tokenizer(PASSAGES, 320))


@pytest.fixture(scope="module")
def generator(tokenizer: Tokenizer) -> Generator:
    size = Size(hidden=32, layers=2, heads=2, kv_heads=1, inner=48)
    return Generator(build_model(size, tokenizer.inner, seed=3), tokenizer)


@pytest.fixture(scope="module")
def index(tokenizer: Tokenizer) -> PassageIndex:
    return PassageIndex.of(PASSAGES, tokenizer, sample=4)


def test_a_wide_beam_finds_all() -> None:
    """With room for everything: all n-grams of the corpus, each with the model's own score."""
    documents = [[0, 1, 2, 1], [1, 1, 3], [2, 0]]
    fm, scorer, end = FMIndex.of(documents, 4), Table(5), 4
    (found,) = beam_search(scorer, [[0]], IndexGuide(fm, fm.all), beams=99, length=3)
    grams = {
        tuple(d[i : i + n]) for d in documents for n in (1, 2, 3) for i in range(len(d) - n + 1)
    }
    assert {h.tokens for h in found.found} == grams and end not in {t for g in grams for t in g}
    for h in found.found:
        path = [0, *h.tokens]
        assert h.logp == pytest.approx(sum(scorer.logps[a, b] for a, b in pairwise(path)))
        assert h.is_whole == (len(h.tokens) == 3) and fm.find(h.tokens) == h.state
    (best,) = beam_search(scorer, [[0]], IndexGuide(fm, fm.all), beams=1, length=3)
    assert [len(h.tokens) for h in best.found] == [1, 1, 2, 2, 3, 3][: len(best.found)]


def test_without_the_guide_some_do_not_occur() -> None:
    fm = FMIndex.of([[0, 1, 2, 1], [1, 1, 3], [2, 0]], 4)
    (free,) = beam_search(Table(5), [[0]], Free(5), beams=5, length=3)
    counts = [fm.count(h.tokens) for h in free.found]
    assert min(counts) == 0 < max(counts)


def test_an_end_ends_a_hypothesis() -> None:
    (found,) = beam_search(Table(4), [[0]], Free(4), beams=50, length=3, end=3)
    whole = {h.tokens for h in found.found if h.is_whole}
    assert (3,) in whole and not any(3 in h.tokens[:-1] for h in found.found)
    assert all(len(tokens) == 3 or tokens[-1] == 3 for tokens in whole)


def test_weights_are_the_sheets() -> None:
    """N = 10,000, log P_q = -2: F = 4 gives a log-odds of 5.158 and w = 26.61; F = 4000 gives 0."""
    found = weights(np.array([-2.0, -2.0]), np.array([4, 4000]), 10_000)
    assert found == pytest.approx([26.61, 0.0], abs=0.01)
    assert weights(np.array([-2.0]), np.array([4]), 10_000, alpha=1) == pytest.approx(
        5.158, abs=1e-3
    )
    falling = weights(np.full(50, -3.0), np.arange(50), 1000)
    assert (np.diff(falling) <= 0).all()
    assert np.isfinite(weights(np.array([0.0]), np.array([1]), 1)).all()
    assert cover(1, 2) == pytest.approx(0.6) and cover(2, 2) == 1


def grams_of(*said: tuple[tuple[int, ...], float]) -> Grams:
    said = tuple(sorted(said, key=lambda pair: -pair[1]))
    tokens = np.full((len(said), max(len(g) for g, _ in said)), -1, np.int64)
    for row, (gram, _) in enumerate(said):
        tokens[row, : len(gram)] = gram
    lengths = np.array([len(g) for g, _ in said])
    values = np.array([w for _, w in said])
    return Grams(tokens, lengths, np.ones(len(said), np.int64), -values, values)


def test_credit_by_hand() -> None:
    """(0,1) at 0: 5. (1,2) overlaps it at 1, is free at 4, one of its tokens new: 4 * 0.6.
    (2,) is covered by then. Position 2 holds 2 and 3 holds 3 in free places: 3 is new."""
    fm = FMIndex.of([[0, 1, 2, 3, 1, 2], [3, 3]], 9)
    grams = grams_of(((0, 1), 5.0), ((1, 2), 4.0), ((3, 3), 1.0))
    ranked = first_stage(occurrences(fm, grams, 10), grams, 0.8)
    assert ranked.documents.tolist() == [0, 1]
    assert ranked.scores == pytest.approx([5 + 4 * 0.6, 1 * (0.2 + 0.8)])
    singles = np.zeros(10)
    singles[[2, 3]] = [10.0, 20.0]
    full = full_score(fm, np.array([0, 1]), grams, singles, 0.8)
    assert dict(zip(full.documents.tolist(), full.scores.tolist(), strict=True)) == pytest.approx(
        {0: 7.4 + 10 * 0.2 + 20, 1: 1.0}
    )
    assert first_stage(occurrences(fm, grams, 1), grams, 0.8).documents.tolist() == [0, 1]


def test_both_stages_agree_where_all_grams_are_rare() -> None:
    rng = np.random.default_rng(1)
    fm = FMIndex.of([rng.integers(0, 6, 40).tolist() for _ in range(12)], 9)
    said = {tuple(rng.integers(0, 6, rng.integers(1, 5)).tolist()) for _ in range(40)}
    grams = grams_of(*((g, float(rng.random())) for g in sorted(said) if fm.count(g)))
    first = first_stage(occurrences(fm, grams, 10_000), grams, 0.8)
    full = full_score(fm, first.documents, grams, np.zeros(10), 0.8)
    assert full.documents.tolist() == first.documents.tolist()
    assert full.scores == pytest.approx(first.scores)


def test_another_document_does_not_change_the_order() -> None:
    documents = [[0, 1, 2, 3], [1, 2, 2, 0], [3, 0, 1, 1]]
    grams = grams_of(((0, 1), 3.0), ((1, 2), 2.0), ((2, 2), 1.5), ((3,), 1.0))
    ranked = [
        first_stage(occurrences(fm, grams, 99), grams, 0.8)
        for fm in (FMIndex.of(documents, 9), FMIndex.of([*documents, [5, 6, 5]], 9))
    ]
    assert ranked[0].documents.tolist() == ranked[1].documents.tolist()
    assert isinstance(occurrences(FMIndex.of(documents, 9), grams, 2), Hits)


def test_beam_scores_are_teacher_forced_ones(generator: Generator, index: PassageIndex) -> None:
    """Queries of unequal length in one batch: padding and caches must not show."""
    seal = Seal(generator, index, Options(beams=4, length=4, title_length=4, query_grams=False))
    queries = ["the miller and his wheel", "fox"]
    for query, said in zip(queries, seal.generate(queries), strict=True):
        prompt = [*generator.tokenizer.encode(" " + query, special=False), index.ids[BODY]]
        some = [g for i in range(len(said.grams.lengths)) if (g := said.grams.text(i))[0] != 1]
        forced = dict(zip(some, generator.logps(prompt, some), strict=True))
        got = {said.grams.text(i): said.grams.logps[i] for i in range(len(said.grams.lengths))}
        assert len(some) > 10
        assert all(abs(got[g] - forced[g]) < 1e-3 for g in some)


def test_every_ngram_occurs_and_titles_are_whole(generator: Generator, index: PassageIndex) -> None:
    seal = Seal(generator, index, Options(beams=6, length=5, title_length=12))
    (said,) = seal.generate(["miller wheel"])
    texts = [said.grams.text(i) for i in range(len(said.grams.lengths))]
    assert all(index.index.count(t) == c for t, c in zip(texts, said.grams.counts, strict=True))
    assert min(said.grams.counts) >= 1 and len(set(texts)) == len(texts)
    assert (np.diff(said.grams.weights) <= 0).all()
    titles = [t for t in texts if (t[0], t[-1]) == (index.ids["eos"], index.ids[TITLE_END])]
    names = {seal.tokenizer.decode(list(t)).strip() for t in titles}
    assert names and names <= {p.title for p in PASSAGES}
    assert " miller" in {text for text, *_ in top_ngrams(said.grams, seal, count=999)}
    free = Seal(generator, index, Options(beams=6, length=5, title_length=12, constrained=False))
    (other,) = free.generate(["miller wheel"])
    assert len(other.grams.lengths) < other.num_generated


class Echo:
    """A generator that says the query's own tokens, each as likely as the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.context = tokenizer, 200

    def begin(self, prompts: Many[Many[int]]) -> tuple[np.ndarray, np.ndarray]:
        laws = np.full((len(prompts), self.tokenizer.vocab_size), 1e-4)
        for law, prompt in zip(laws, prompts, strict=True):
            law[list(prompt)] = 1
        laws = np.log(laws / laws.sum(axis=1, keepdims=True))
        return laws, laws

    def go_on(self, state: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> tuple:
        return state[rows], state[rows]

    def logps(self, prompt: Many[int], grams: Many[Many[int]]) -> np.ndarray:
        law = self.begin([prompt])[1][0]
        return np.array([law[list(gram)].sum() for gram in grams])


@pytest.mark.parametrize("score", ["intersective", "lm_fm", "lm"])
def test_search_finds_what_the_query_names(index: PassageIndex, score: str) -> None:
    options = Options(beams=8, length=6, title_length=6, smoothing=0.01)
    seal = Seal(Echo(index.tokenizer), index, options)  # type: ignore[arg-type]
    (first, second) = seal.search(["red fox ran over", "miller lost his wheel"], k=2, score=score)
    assert first.passages[0] == 0 and second.passages[0] == 2
    assert (np.diff(first.scores) <= 0).all() and len(second.passages) <= 2


def test_passages_come_back_and_the_file_is_checked(
    index: PassageIndex, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert [index.passage(i) for i in range(len(index))] == PASSAGES
    index.save(tmp_path / "a.fm")
    assert PassageIndex.load(tmp_path / "a.fm", tokenizer).passage(1) == PASSAGES[1]
    other = Tokenizer(make_tokenizer(PASSAGES[:1], 300))
    with pytest.raises(ConfigError, match="tokenizer of another vocabulary"):
        PassageIndex.load(tmp_path / "a.fm", other)
    (tmp_path / "a.fm").write_bytes((tmp_path / "a.fm").read_bytes()[:-9])
    with pytest.raises(DataError, match="cut off"):
        PassageIndex.load(tmp_path / "a.fm", tokenizer)
    with pytest.raises(DataError, match="expected documents"):
        PassageIndex.of([], tokenizer)


def test_what_is_refused(generator: Generator, index: PassageIndex) -> None:
    seal = Seal(generator, index)
    with pytest.raises(DataError, match="query is empty"):
        seal.search(["  "])
    with pytest.raises(CapacityError, match="exceeds the limit"):
        seal.search(["fox " * 400])
    with pytest.raises(UnknownName, match="intersective"):
        seal.search(["fox"], score="intersectiv")
    with pytest.raises(ConfigError, match="beta"):
        Options(beta=2)
    with pytest.raises(ConfigError, match="both off"):
        Options(bodies=False, titles=False)
    other = Tokenizer(make_tokenizer(PASSAGES[:1], 300))
    with pytest.raises(ConfigError, match="different tokenizers"):
        Seal(generator, PassageIndex.of(PASSAGES, other))


def test_a_query_of_signs_that_no_passage_has(generator: Generator, index: PassageIndex) -> None:
    """Its own n-grams are dropped, what the model says still occurs."""
    seal = Seal(generator, index, Options(beams=2, length=2, title_length=2))
    (found,) = seal.search(["日本 €€ ~~"])
    assert min(found.generated.grams.counts) >= 1


def test_passage_files(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    write_passages(file, PASSAGES)
    assert read_passages(file) == PASSAGES
    file.write_text('{"title": "a"}\n')
    with pytest.raises(DataError, match="line 1"):
        read_passages(file)
    file.write_text('{"title": "a", "title": "b", "body": "c"}\n')
    with pytest.raises(DataError, match="line 1"):
        read_passages(file)
    file.write_text("\n")
    with pytest.raises(DataError, match="no passages"):
        read_passages(file)
    with pytest.raises(DataError, match="cannot read"):
        read_passages(tmp_path / "none.jsonl")


def test_measures() -> None:
    assert measures.accuracy([5, 3, 1], {3}, 1) == 0 and measures.accuracy([5, 3, 1], {3}, 2) == 1
    assert measures.r_precision([5, 3, 1, 2], {3, 2, 5}) == pytest.approx(2 / 3)
    assert measures.r_precision([], {1}) == measures.r_precision([1], set()) == 0
    mean, low, high = measures.interval([0, 1] * 50)
    assert mean == 0.5 and 0.38 < low < 0.45 and 0.55 < high < 0.62


def test_bm25_names_the_passage_with_the_words() -> None:
    pytest.importorskip("bm25s")
    from forerun.retrieval.bm25 import BM25

    found = BM25(PASSAGES).search(["hen and dog", "miller lost wheel", "the long night"], k=5)
    assert found.shape == (3, 3) and found[:, 0].tolist() == [0, 2, 2]
