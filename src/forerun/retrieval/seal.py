"""SEAL: passages found by generating n-grams of them.

Bevilacqua et al., "Autoregressive Search Engines: Generating Substrings as Document Identifiers",
2022. A language model that was trained to say n-grams of relevant passages is held, in a beam
search, to n-grams that occur; all candidates met on the way are kept. An n-gram weighs what the
query makes more likely of it (`weights`), and a passage gets what its n-grams weigh together
(`ranking`).

Law: every generated n-gram occurs in the index. Does not touch decoding.
Needs: a generator (training/recipes/seal) and an FM-index of the passages by its tokenizer.
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
    NOBODY,
    Grams,
    Ranked,
    best_single,
    first_stage,
    full_score,
    occurrences,
)
from forerun.retrieval.token_beam import Free, Searched, beam_search
from forerun.retrieval.weights import weights

SCORES = ("intersective", "lm_fm", "lm")
WORDS = 3  # longest word n-gram of a query


@dataclass(frozen=True)
class Options:
    """The published settings."""

    beams: int = 15
    length: int = 10  # tokens of a body's n-gram
    title_length: int = 15  # most tokens of a title's
    alpha: float = 2.0
    beta: float = 0.8
    smoothing: float = 5.0
    max_hits: int = 1500  # n-grams that occur no more often look for candidates
    max_count: int = 10_000_000  # n-grams that occur more often count for nothing
    fully_score: int = 1500  # candidates that are read whole
    top_tokens: int = 5000  # single tokens that count
    bodies: bool = True
    titles: bool = True
    query_grams: bool = True
    singles: bool = True
    constrained: bool = True  # False: the model is free, and n-grams that do not occur are dropped

    def __post_init__(self) -> None:
        if min(self.beams, self.length, self.title_length, self.max_hits, self.fully_score) < 1:
            raise ConfigError("beams, lengths, max_hits and fully_score must be at least 1")
        if not 0 <= self.beta <= 1 or self.smoothing <= 0 or self.alpha <= 0:
            raise ConfigError("expected beta in [0, 1], and smoothing and alpha above 0")
        if not (self.bodies or self.titles):
            raise ConfigError("neither bodies nor titles are generated; switch one of them on")


class Generated(NamedTuple):
    """What the model said about one query."""

    grams: Grams  # of which the index holds at least one occurrence
    whole: np.ndarray  # bool [m]: not only a prefix of a beam
    singles: np.ndarray  # float64 [V]: weights of single tokens
    num_generated: int  # different n-grams that the model said
    occurring: int  # how many of these occur


class Found(NamedTuple):
    """Passages for a query, best first, and the n-grams that led there."""

    passages: np.ndarray  # int64 [k]
    scores: np.ndarray  # float64 [k]
    said: Generated


class Within:
    """A guide: n-grams of an index, from some n-gram on; documents do not run into each other."""

    def __init__(self, index: FMIndex, start: Interval) -> None:
        self.index, self.start = index, start
        self._first = self._ids(start)

    def next(self, state: Interval) -> np.ndarray:
        """The ids that come next somewhere, the end of a document left out."""
        return self._first if state == self.start else self._ids(state)

    def advance(self, state: Interval, token: int) -> Interval:
        """The rows of the longer n-gram."""
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
                "the passages were indexed with another tokenizer than the generator's: the same "
                "ids mean different texts; index them with the generator's"
            )
        index = passages.index
        ids, counts = index.next_in(index.all)
        self._counts = np.zeros(passages.tokenizer.vocab_size, np.int64)
        self._counts[ids] = counts
        self._bodies, self._titles = (
            Within(index, index.all),
            Within(index, index.find([index.eos])),
        )

    def search(
        self, queries: Many[str], *, k: int = 100, batch: int = 20, score: str = SCORES[0]
    ) -> list[Found]:
        """The best k passages of each query. Raises DataError, CapacityError, UnknownName."""
        if score not in SCORES:
            raise UnknownName.of("score", score, SCORES)
        out = []
        for said in self.generate(queries, batch=batch):
            best = self.rank(said, score)
            out.append(Found(best.documents[:k], best.scores[:k], said))
        return out

    def generate(self, queries: Many[str], *, batch: int = 20) -> Iterator[Generated]:
        """What the model says about each query; ranking is apart, so scores can be compared."""
        prompts = [self._prompt(query) for query in queries]
        for at in range(0, len(prompts), batch):
            some = prompts[at : at + batch]
            bodies = self._beams(some, BODY) if self.options.bodies else [None] * len(some)
            titles = self._beams(some, TITLE) if self.options.titles else [None] * len(some)
            for i, (body, title) in enumerate(zip(bodies, titles, strict=True)):
                yield self._collect(queries[at + i], some[i], body, title)

    def rank(self, said: Generated, score: str = SCORES[0]) -> Ranked:
        """Passages by one of the scores.

        lm: the most likely whole n-gram; lm_fm: the n-gram of the largest weight; intersective:
        what all of them weigh together.
        """
        options, index, grams = self.options, self.passages.index, said.grams
        if score == "lm":
            some = _chosen(grams, said.whole)
            hits = occurrences(index, some, options.max_hits)
            return best_single(hits, some.logps) if len(some.lengths) else NOBODY
        kept = _chosen(grams, (grams.weights > 0) & (grams.counts <= options.max_count))
        rare = _chosen(kept, kept.counts <= options.max_hits)
        if not len(rare.lengths):
            return NOBODY
        hits = occurrences(index, rare, options.max_hits)
        if score == "lm_fm":
            return best_single(hits, rare.weights)
        first = first_stage(hits, rare, options.beta)
        best = first.documents[: options.fully_score]
        return full_score(index, best, kept, said.singles, options.beta)

    def _prompt(self, query: str) -> list[int]:
        if not query.strip():
            raise DataError("expected a query, got an empty text; ask something")
        ids = self.tokenizer.encode(spaced(query), special=False)
        room = self.generator.context - max(self.options.length, self.options.title_length) - 1
        if len(ids) > room:
            raise CapacityError(
                f"a query of {len(ids)} tokens does not fit: the model reads {room}; shorten it"
            )
        return ids

    def _beams(self, prompts: list[list[int]], what: str) -> list[Searched]:
        options = self.options
        is_body = what == BODY
        guide: Within | Free = self._bodies if is_body else self._titles
        if not options.constrained:
            guide = Free(self.tokenizer.vocab_size)
        return beam_search(
            self.generator,
            [[*prompt, self.ids[what]] for prompt in prompts],
            guide,
            beams=options.beams,
            length=options.length if is_body else options.title_length,
            end=None if is_body else self.ids[TITLE_END],
        )

    def _collect(
        self, query: str, prompt: list[int], body: Searched | None, title: Searched | None
    ) -> Generated:
        """All n-grams of a query with their counts and weights, those that do not occur dropped."""
        eos, said = self.ids["eos"], dict[tuple[int, ...], tuple[float, bool]]()
        for hypothesis in title.found if title else ():
            said[(eos, *hypothesis.tokens)] = (hypothesis.logp, hypothesis.is_whole)
        for hypothesis in body.found if body else ():
            said[hypothesis.tokens] = (hypothesis.logp, hypothesis.is_whole)
        generated = said.keys() | set()
        if self.options.query_grams:
            own = [gram for gram in self._query_grams(query) if gram not in said]
            own_logps = self.generator.logps([*prompt, self.ids[BODY]], own)
            said |= {gram: (float(logp), False) for gram, logp in zip(own, own_logps, strict=True)}
        index = self.passages.index
        counted = {gram: count for gram in said if (count := index.count(gram))}
        occurring = len(generated & counted.keys())
        logps = np.array([said[gram][0] for gram in counted], float)
        whole = np.array([said[gram][1] for gram in counted], bool)
        counts = np.fromiter(counted.values(), np.int64, len(counted))
        total, s, alpha = index.length, self.options.smoothing, self.options.alpha
        found = weights(logps, counts, total, smoothing=s, alpha=alpha)
        grams, order = _sorted(list(counted), counts, logps, found)
        singles = self._singles(body.first) if body else np.zeros(len(self._counts))
        return Generated(grams, whole[order], singles, len(generated), occurring)

    def _singles(self, first: np.ndarray) -> np.ndarray:
        """Weights of the likeliest first tokens; here alpha is 1."""
        out = np.zeros(len(self._counts))
        if self.options.singles:
            top = np.argsort(-first, kind="stable")[: self.options.top_tokens]
            top = top[(self._counts[top] > 0) & (top != self.ids["eos"])]
            total, s = self.passages.index.length, self.options.smoothing
            out[top] = weights(first[top], self._counts[top], total, smoothing=s, alpha=1.0)
        return out

    def _query_grams(self, query: str) -> list[tuple[int, ...]]:
        """n-grams of up to 3 words of the query that occur, lower or capital letters first."""
        words, found = query.split(), dict[tuple[int, ...], None]()
        for size in range(1, WORDS + 1):
            for at in range(len(words) - size + 1):
                forms = [{w, w.lower(), w.capitalize()} for w in words[at : at + size]]
                for form in product(*map(sorted, forms)):
                    ids = tuple(self.tokenizer.encode(" " + " ".join(form), special=False))
                    if self.passages.index.count(ids):
                        found[ids] = None
        return list(found)


def _sorted(
    said: list[tuple[int, ...]], counts: np.ndarray, logps: np.ndarray, found: np.ndarray
) -> tuple[Grams, np.ndarray]:
    """N-grams by falling weight (ties: in the order of ids), and that order."""
    tokens = np.full((len(said), max(map(len, said), default=1)), -1, np.int64)
    for row, gram in enumerate(said):
        tokens[row, : len(gram)] = gram
    lengths = np.array([len(gram) for gram in said], np.int64)
    order = np.lexsort((*tokens.T[::-1], -found))
    return _chosen(Grams(tokens, lengths, counts, logps, found), order), order


def _chosen(grams: Grams, which: np.ndarray) -> Grams:
    """Some of the n-grams, in their order."""
    return Grams(*(part[which] for part in grams))


def spoken(grams: Grams, seal: Seal, most: int = 10) -> list[tuple[str, int, float, float]]:
    """The weightiest n-grams as text, with count, log-probability and weight."""
    return [
        (
            seal.tokenizer.inner.decode(list(grams.text(i))),
            int(grams.counts[i]),
            float(grams.logps[i]),
            float(grams.weights[i]),
        )
        for i in range(min(most, len(grams.lengths)))
    ]
