"""Infini-gram by its definition: estimates that read all documents, and a weak model to mix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many

import numpy as np

Case = tuple[list[int], int]  # a context and its next token


class Reader:
    """Estimates from documents; the token `end` follows each of them."""

    def __init__(self, documents: list[list[int]], end: int) -> None:
        self.documents, self.end = documents, end
        self.places: dict[int, list[tuple[list[int], int]]] = {}  # positions behind each token
        for document in documents:
            for i, token in enumerate(document):
                self.places.setdefault(token, []).append((document, i + 1))

    def estimate(self, context: Many[int]) -> tuple[int, Counter[int]]:
        """Length of the longest suffix that occurs, and counts of the tokens behind it."""
        places, n = self.places.get(context[-1], []), 1
        if not places:
            tokens = Counter(token for document in self.documents for token in document)
            return 0, tokens + Counter({self.end: len(self.documents)})
        while n < len(context):
            longer = [(d, i) for d, i in places if i > n and d[i - n - 1] == context[-n - 1]]
            if not longer:
                break
            places, n = longer, n + 1
        return n, Counter(d[i] if i < len(d) else self.end for d, i in places)


class Bigrams:
    """Smoothed counts of pairs of tokens."""

    def __init__(self, documents: list[list[int]], end: int) -> None:
        self.table = np.full((end + 1, end + 1), 0.05)
        for document in documents:
            np.add.at(self.table, (document, [*document[1:], end]), 1)
        self.table /= self.table.sum(1, keepdims=True)

    def law(self, context: Many[int]) -> np.ndarray:
        """P(token), float64 [end + 1]."""
        return self.table[context[-1]]


def mixed(
    reader: Reader, model: Bigrams, context: list[int], sparse: float, other: float
) -> np.ndarray:
    """The mixture: one weight if a single token follows the suffix, another if several do."""
    _, counts = reader.estimate(context)
    w = sparse if len(counts) == 1 else other
    law = (1 - w) * model.law(context)
    for token, count in counts.items():
        law[token] += w * count / counts.total()
    return law


def positions(texts: list[list[int]], end: int, count: int) -> list[Case]:
    """Some contexts with their next tokens, ends of documents among them."""
    every = [(d[:i], (*d, end)[i]) for d in texts for i in range(1, len(d) + 1)]
    return [every[i] for i in np.random.default_rng(0).permutation(len(every))[:count]]


def overlap(document: list[int], texts: list[list[int]], n: int = 13) -> float:
    """The share of the document's n-grams that occur in the texts."""
    known = {tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)}
    own = [tuple(document[i : i + n]) for i in range(len(document) - n + 1)]
    return sum(gram in known for gram in own) / len(own)
