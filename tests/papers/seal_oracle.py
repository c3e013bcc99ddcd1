"""SEAL in plain Python: n-grams of a made-up model, their weights, and the three scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import product

import numpy as np

from forerun.models.tokenizer import Tokenizer
from forerun.retrieval.passages import BODY, TITLE, TITLE_END, Passage
from forerun.retrieval.seal import Options

Gram = tuple[int, ...]
Said = dict[Gram, tuple[float, bool]]  # log P_q, and whether the n-gram is a whole hypothesis


class TableModel:
    """A generator of which the next token depends on the last one alone."""

    def __init__(self, tokenizer: Tokenizer, text: str, seed: int) -> None:
        self.tokenizer, self.context = tokenizer, 200
        rng, size = np.random.default_rng(seed), tokenizer.vocab_size
        known = [*set(tokenizer.encode(text, special=False)), tokenizer.vocabulary()[TITLE_END]]
        p = 0.1 * rng.dirichlet(np.ones(size), size)  # [last, next]; 0.9 for tokens of the text
        p[:, known] += 0.9 * rng.dirichlet(np.full(len(known), 0.3), size)
        self.table = np.log(p)

    def begin(self, prompts: Many[Many[int]]) -> tuple[None, np.ndarray]:
        return None, self.table[[prompt[-1] for prompt in prompts]]

    def go_on(self, state: None, rows: np.ndarray, tokens: np.ndarray) -> tuple[None, np.ndarray]:
        return None, self.table[tokens]

    def logps(self, prompt: Many[int], grams: Many[Many[int]]) -> np.ndarray:
        return np.array([self.logp(prompt[-1], tuple(gram)) for gram in grams])

    def logp(self, last: int, gram: Gram) -> float:
        """log P of an n-gram after a token; not renormalised over any subset."""
        return sum(float(self.table[a, b]) for a, b in zip((last, *gram), gram, strict=False))


def occurrences(gram: Gram, text: Many[int]) -> Iterator[int]:
    """The positions of an n-gram."""
    return (i for i in range(len(text)) if tuple(text[i : i + len(gram)]) == gram)


def holds(text: Many[int], gram: Gram) -> bool:
    """Whether an n-gram occurs."""
    return next(occurrences(gram, text), None) is not None


@dataclass
class Oracle:
    """SEAL's search over passages with a made-up model, by the paper's rules."""

    passages: list[Passage]
    model: TableModel
    how: Options

    def __post_init__(self) -> None:
        self.covers = set[float]()  # factors that were applied
        known = self.model.tokenizer.vocabulary()
        self.ids = {name: known[name] for name in (BODY, TITLE, TITLE_END)}
        self.eos = self.model.tokenizer.eos_ids[0]
        self.documents = [
            [*self.encode(p.title), self.ids[TITLE_END], *self.encode(p.body)]
            for p in self.passages
        ]
        self.text = [self.eos]
        for document in self.documents:
            self.text += [*document, self.eos]

    def encode(self, text: str) -> Gram:
        return tuple(self.model.tokenizer.encode(" " + text, special=False))

    def count(self, gram: Gram) -> int:
        return len(list(occurrences(gram, self.text)))

    def following(self, gram: Gram) -> set[int]:
        """Allowed next tokens: those behind the n-gram in a document; all without constraint."""
        if not self.how.constrained:
            return set(range(self.model.tokenizer.vocab_size))
        ends = (i + len(gram) for i in occurrences(gram, self.text))
        return {self.text[i] for i in ends if i < len(self.text)} - {self.eos}

    def beams(self, marker: str) -> Said:
        """The best 2K candidates of every step; the best K that have not ended go on."""
        how, begin = self.how, (self.eos,) if marker == TITLE else ()
        depth = how.title_length if marker == TITLE else how.length
        said: Said = {}
        alive = {begin: 0.0}
        for step in range(1, depth + 1):
            every = [
                ((*gram, token), logp + float(self.model.table[last, token]))
                for gram, logp in alive.items()
                for last in [gram[-1] if step > 1 else self.ids[marker]]
                for token in self.following(gram)
            ]
            best = sorted(every, key=lambda found: -found[1])[: 2 * how.beams]
            ended = {g for g, _ in best if marker == TITLE and g[-1] == self.ids[TITLE_END]}
            alive = dict([found for found in best if found[0] not in ended][: how.beams])
            for gram, logp in best:
                said[gram] = logp, gram in ended or (step == depth and gram in alive)
        return said

    def query_grams(self, query: str) -> set[Gram]:
        """n-grams of 1 to 3 words of the query, as written, in lower case and capitalised."""
        words = query.split()
        runs = [words[i : i + n] for n in (1, 2, 3) for i in range(len(words) - n + 1)]
        return {
            self.encode(" ".join(form))
            for run in runs
            for form in product(*({w, w.lower(), w.capitalize()} for w in run))
        }

    def said(self, query: str) -> Said:
        """All n-grams that occur, with the model's log-probabilities."""
        asked = {g: (self.model.logp(self.ids[BODY], g), False) for g in self.query_grams(query)}
        every = asked | self.beams(BODY) | self.beams(TITLE)
        return {gram: found for gram, found in every.items() if self.count(gram)}

    def weight(self, logp: float, count: int, alpha: float) -> float:
        """max(0, log odds of P_q minus log odds of P_u) ** alpha."""
        s = self.how.smoothing
        p_q, p_u = math.exp(logp), (count + s) / (len(self.text) + s)
        odds = math.log(p_q / (1 - p_q)) - math.log(p_u / (1 - p_u))
        return max(0.0, odds) ** alpha

    def weights(self, said: Said) -> dict[Gram, float]:
        """By falling weight."""
        found = {
            g: self.weight(logp, self.count(g), self.how.alpha) for g, (logp, _) in said.items()
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def singles(self) -> dict[int, float]:
        """Weights of the likeliest first tokens of a body, with exponent 1."""
        first = self.model.table[self.ids[BODY]]
        top = sorted(range(len(first)), key=lambda token: -first[token])[: self.how.top_tokens]
        counts = {t: self.count((t,)) for t in top if t != self.eos}
        return {t: self.weight(float(first[t]), n, 1.0) for t, n in counts.items() if n}

    def credit(
        self, weights: dict[Gram, float], text: Many[int], singles: dict[int, float]
    ) -> float:
        """The score of a text: each n-gram once, none over another, then tokens at free places."""
        free, held, score = [True] * len(text), set[int](), 0.0
        for gram, weight in weights.items():
            for at in occurrences(gram, text):
                if all(free[at : at + len(gram)]):
                    score += weight * self.cover(gram, held)
                    free[at : at + len(gram)] = [False] * len(gram)
                    held |= set(gram)
                    break
        left = {token for token, is_free in zip(text, free, strict=True) if is_free}
        return score + sum(singles.get(t, 0.0) * self.cover((t,), held) for t in sorted(left))

    def cover(self, gram: Gram, held: set[int]) -> float:
        """1 - beta + beta (share of new tokens)."""
        factor = 1 - self.how.beta + self.how.beta * len(set(gram) - held) / len(set(gram))
        self.covers.add(factor)
        return factor

    def rank(self, query: str, score: str) -> dict[int, float]:
        """Documents with scores, best first."""
        said = self.said(query)
        kept = {g: w for g, w in self.weights(said).items() if w > 0}
        kept = {g: w for g, w in kept.items() if self.count(g) <= self.how.max_count}
        rare = {g: w for g, w in kept.items() if self.count(g) <= self.how.max_hits}
        if score == "lm":
            return self.best_single({g: logp for g, (logp, is_whole) in said.items() if is_whole})
        if score == "lm_fm":
            return self.best_single(rare)
        texts = [[self.eos, *document] for document in self.documents]
        some = [i for i, text in enumerate(texts) if any(holds(text, gram) for gram in rare)]
        first = by_score({i: self.credit(rare, texts[i], {}) for i in some})
        best = list(first)[: self.how.fully_score]
        return by_score({i: self.credit(kept, texts[i], self.singles()) for i in best})

    def best_single(self, values: dict[Gram, float]) -> dict[int, float]:
        """Documents by the largest value of an n-gram that they hold."""
        found: dict[int, float] = {}
        for i, document in enumerate(self.documents):
            text = [self.eos, *document]
            held = [value for gram, value in values.items() if holds(text, gram)]
            if held:
                found[i] = max(held)
        return by_score(found)


def by_score(scores: dict[int, float]) -> dict[int, float]:
    """By falling score; ties: by number."""
    return dict(sorted(scores.items(), key=lambda item: (-item[1], item[0])))
