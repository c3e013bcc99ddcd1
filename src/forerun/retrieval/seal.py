"""SEAL: passage retrieval by generating n-grams of the passages.

Bevilacqua et al., "Autoregressive Search Engines: Generating Substrings as Document Identifiers",
2022. A language model is trained to generate n-grams of relevant passages. Its beam search is
constrained to n-grams of the index and keeps all candidates. `weights` gives an n-gram's weight
from its probability with and without the query; `ranking` scores passages by their n-grams.

Law: every generated n-gram occurs in the index. Decoding of answers is not affected.
Needs: a generator (training/recipes/seal) and an FM-index built with its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from forerun.errors import CapacityError, ConfigError, DataError, UnknownName
from forerun.ngrams.index.fm.index import FMIndex, Interval
from forerun.retrieval.generator import Generator
from forerun.retrieval.passages import BODY, TITLE, TITLE_END, PassageIndex, spaced
from forerun.retrieval.ranking import (
    NO_DOCUMENTS,
    Grams,
    Ranked,
    best_single,
    first_stage,
    full_score,
    occurrences,
)
from forerun.retrieval.token_beam import Free, Searched, beam_search
from forerun.retrieval.weights import weights
from forerun.utils.numbers import finite, whole

SCORES = ("intersective", "lm_fm", "lm")
MAX_QUERY_GRAM_WORDS = 3


@dataclass(frozen=True)
class Options:
    """Settings of the search; the defaults are the paper's."""

    beams: int = 15
    length: int = 10  # tokens of a body n-gram
    title_length: int = 15  # most tokens of a title n-gram
    alpha: float = 2.0
    beta: float = 0.8
    smoothing: float = 5.0
    max_hits: int = 1500  # largest count of an n-gram that gives candidates
    max_count: int = 10_000_000  # more frequent n-grams are ignored
    fully_score: int = 1500  # candidates of the second stage
    top_tokens: int = 5000  # single tokens with a weight
    bodies: bool = True
    titles: bool = True
    query_grams: bool = True
    singles: bool = True
    constrained: bool = True  # False: free generation; n-grams not in the index are dropped

    def __post_init__(self) -> None:
        for name in ("beams", "length", "title_length", "max_hits", "max_count", "fully_score"):
            whole(name, getattr(self, name))
        whole("top_tokens", self.top_tokens, 0)
        finite("beta", self.beta, 0, 1)
        for name in ("smoothing", "alpha"):
            finite(name, getattr(self, name), 0, is_open=True)
        if not (self.bodies or self.titles):
            raise ConfigError("bodies and titles are both off; set one of them to True")


class Generated(NamedTuple):
    """The n-grams generated for one query."""

    grams: Grams  # those that occur in the index
    whole: np.ndarray  # bool [m]: a finished hypothesis, not only a prefix of a beam
    singles: np.ndarray  # float64 [V]: weights of single tokens
    num_generated: int  # distinct n-grams from the model
    occurring: int  # how many of these occur in the index


class SearchResult(NamedTuple):
    """Passages for a query, best first, and the generated n-grams."""

    passages: np.ndarray  # int64 [k]
    scores: np.ndarray  # float64 [k]
    generated: Generated


class IndexGuide:
    """A beam-search guide: continuations of `start` that occur in the index, within a document."""

    def __init__(self, index: FMIndex, start: Interval) -> None:
        self.index, self.start = index, start
        self._first = self._ids(start)

    def next(self, state: Interval) -> np.ndarray:
        """The ids that follow the n-gram in the index, without eos."""
        return self._first if state == self.start else self._ids(state)

    def advance(self, state: Interval, token: int) -> Interval:
        """The rows of the n-gram extended by a token."""
        return self.index.extend(state, token)

    def _ids(self, state: Interval) -> np.ndarray:
        ids, _ = self.index.next_in(state)
        return ids[ids != self.index.eos]


class Seal:
    """Searches passages with a generator."""

    def __init__(
        self, generator: Generator, passages: PassageIndex, options: Options | None = None
    ) -> None:
        self.generator, self.passages = generator, passages
        self.options = options or Options()
        self.tokenizer, self.ids = passages.tokenizer, passages.ids
        if generator.tokenizer.vocabulary() != passages.tokenizer.vocabulary():
            raise ConfigError(
                "the index and the generator have different tokenizers; index the passages with "
                "the generator's tokenizer"
            )
        index = passages.index
        ids, counts = index.next_in(index.all)
        self._counts = np.zeros(passages.tokenizer.vocab_size, np.int64)
        self._counts[ids] = counts
        self._bodies = IndexGuide(index, index.all)
        self._titles = IndexGuide(index, index.find([index.eos]))

    def search(
        self, queries: Many[str], *, k: int = 100, batch: int = 20, score: str = SCORES[0]
    ) -> list[SearchResult]:
        """The best k passages of each query. Raises DataError, CapacityError, UnknownName."""
        if score not in SCORES:
            raise UnknownName.of("score", score, SCORES)
        whole("k", k)
        out = []
        for generated in self.generate(queries, batch=batch):
            best = self.rank(generated, score)
            out.append(SearchResult(best.documents[:k], best.scores[:k], generated))
        return out

    def generate(self, queries: Many[str], *, batch: int = 20) -> Iterator[Generated]:
        """The n-grams for each query; `rank` takes them, so scores can be compared."""
        whole("batch", batch)
        prompts = [self._prompt(query) for query in queries]
        for at in range(0, len(prompts), batch):
            group = prompts[at : at + batch]
            bodies = self._beams(group, BODY) if self.options.bodies else [None] * len(group)
            titles = self._beams(group, TITLE) if self.options.titles else [None] * len(group)
            for i, (body, title) in enumerate(zip(bodies, titles, strict=True)):
                yield self._collect(queries[at + i], group[i], body, title)

    def rank(self, generated: Generated, score: str = SCORES[0]) -> Ranked:
        """Passages by one of the scores.

        lm: log-probability of the most likely whole n-gram; lm_fm: the largest weight of an n-gram;
        intersective: all n-grams, as in `ranking`.
        """
        options, index, grams = self.options, self.passages.index, generated.grams
        if score == "lm":
            whole = _select(grams, generated.whole)
            hits = occurrences(index, whole, options.max_hits)
            return best_single(hits, whole.logps) if len(whole.lengths) else NO_DOCUMENTS
        kept = _select(grams, (grams.weights > 0) & (grams.counts <= options.max_count))
        rare = _select(kept, kept.counts <= options.max_hits)
        if not len(rare.lengths):
            return NO_DOCUMENTS
        hits = occurrences(index, rare, options.max_hits)
        if score == "lm_fm":
            return best_single(hits, rare.weights)
        first = first_stage(hits, rare, options.beta)
        best = first.documents[: options.fully_score]
        return full_score(index, best, kept, generated.singles, options.beta)

    def _prompt(self, query: str) -> list[int]:
        if not query.strip():
            raise DataError("the query is empty; write a text to search for")
        ids = self.tokenizer.encode(spaced(query), special=False)
        limit = self.generator.context - max(self.options.length, self.options.title_length) - 1
        if len(ids) > limit:
            raise CapacityError(
                f"a query of {len(ids)} tokens exceeds the limit of {limit}; shorten it"
            )
        return ids

    def _beams(self, prompts: list[list[int]], marker: str) -> list[Searched]:
        options = self.options
        is_body = marker == BODY
        guide: IndexGuide | Free = self._bodies if is_body else self._titles
        if not options.constrained:
            guide = Free(self.tokenizer.vocab_size)
        return beam_search(
            self.generator,
            [[*prompt, self.ids[marker]] for prompt in prompts],
            guide,
            beams=options.beams,
            length=options.length if is_body else options.title_length,
            end=None if is_body else self.ids[TITLE_END],
        )

    def _collect(
        self, query: str, prompt: list[int], body: Searched | None, title: Searched | None
    ) -> Generated:
        """All n-grams of a query that occur in the index, with counts and weights."""
        eos, known = self.ids["eos"], dict[tuple[int, ...], tuple[float, bool]]()
        for hypothesis in title.found if title else ():
            known[(eos, *hypothesis.tokens)] = (hypothesis.logp, hypothesis.is_whole)
        for hypothesis in body.found if body else ():
            known[hypothesis.tokens] = (hypothesis.logp, hypothesis.is_whole)
        generated = set(known)
        if self.options.query_grams:
            added = [gram for gram in self._query_grams(query) if gram not in known]
            logps = self.generator.logps([*prompt, self.ids[BODY]], added).tolist()
            known |= {gram: (logp, False) for gram, logp in zip(added, logps, strict=True)}
        index = self.passages.index
        counted = {gram: count for gram in known if (count := index.count(gram))}
        occurring = len(generated & counted.keys())
        logps = np.array([known[gram][0] for gram in counted], float)
        whole = np.array([known[gram][1] for gram in counted], bool)
        counts = np.fromiter(counted.values(), np.int64, len(counted))
        total, s, alpha = index.length, self.options.smoothing, self.options.alpha
        found = weights(logps, counts, total, smoothing=s, alpha=alpha)
        grams, order = _sorted(list(counted), counts, logps, found)
        singles = self._singles(body.first) if body else np.zeros(len(self._counts))
        return Generated(grams, whole[order], singles, len(generated), occurring)

    def _singles(self, first: np.ndarray) -> np.ndarray:
        """Weights [V] of the most likely first tokens, with alpha = 1."""
        out = np.zeros(len(self._counts))
        if self.options.singles:
            top = np.argsort(-first, kind="stable")[: self.options.top_tokens]
            top = top[(self._counts[top] > 0) & (top != self.ids["eos"])]
            total, s = self.passages.index.length, self.options.smoothing
            out[top] = weights(first[top], self._counts[top], total, smoothing=s, alpha=1.0)
        return out

    def _query_grams(self, query: str) -> list[tuple[int, ...]]:
        """n-grams of up to 3 query words that occur, as written, lower-cased or capitalised."""
        words, found = query.split(), dict[tuple[int, ...], None]()
        for size in range(1, MAX_QUERY_GRAM_WORDS + 1):
            for at in range(len(words) - size + 1):
                forms = [{w, w.lower(), w.capitalize()} for w in words[at : at + size]]
                for form in product(*map(sorted, forms)):
                    ids = tuple(self.tokenizer.encode(" " + " ".join(form), special=False))
                    if self.passages.index.count(ids):
                        found[ids] = None
        return list(found)


def _sorted(
    ngrams: list[tuple[int, ...]], counts: np.ndarray, logps: np.ndarray, values: np.ndarray
) -> tuple[Grams, np.ndarray]:
    """N-grams by falling weight (ties: by ids), and the permutation."""
    tokens = np.full((len(ngrams), max(map(len, ngrams), default=1)), -1, np.int64)
    for row, gram in enumerate(ngrams):
        tokens[row, : len(gram)] = gram
    lengths = np.array([len(gram) for gram in ngrams], np.int64)
    order = np.lexsort((*tokens.T[::-1], -values))
    return _select(Grams(tokens, lengths, counts, logps, values), order), order


def _select(grams: Grams, rows: np.ndarray) -> Grams:
    """The n-grams of a mask or of indices."""
    return Grams(*(part[rows] for part in grams))


def top_ngrams(grams: Grams, seal: Seal, count: int = 10) -> list[tuple[str, int, float, float]]:
    """The n-grams with the largest weights: text, count, log-probability, weight."""
    return [
        (
            seal.tokenizer.inner.decode(list(grams.text(i))),
            int(grams.counts[i]),
            float(grams.logps[i]),
            float(grams.weights[i]),
        )
        for i in range(min(count, len(grams.lengths)))
    ]
