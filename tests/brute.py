"""An index and its answers by looking at everything."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from forerun.ngrams.index.build.suffix_array import TYPES, separator
from forerun.ngrams.index.query.engine import Index

documents = st.lists(st.lists(st.integers(0, 3), max_size=14), min_size=1, max_size=7)
queries = st.lists(st.integers(0, 4), max_size=6)
widths = st.sampled_from([1, 2, 4])
shard_counts = st.sampled_from([1, 3])


class Brute:
    """The same answers from lists."""

    def __init__(self, docs: list[list[int]], shards: int, end: int) -> None:
        self.texts = [[t for doc in docs[s::shards] for t in (end, *doc)] for s in range(shards)]
        self.end = end

    def hits(self, query: list[int]) -> list[tuple[int, int]]:
        return [
            (s, i)
            for s, text in enumerate(self.texts)
            for i in range(len(text))
            if text[i : i + len(query)] == query and i + len(query) <= len(text)
        ]

    def count(self, query: list[int]) -> int:
        return len(self.hits(query))

    def following(self, query: list[int]) -> Counter[int]:
        """The end of the data counts as the end of a document."""
        return Counter((self.texts[s] + [self.end])[i + len(query)] for s, i in self.hits(query))

    def longest_suffix(self, query: list[int]) -> int:
        return next(n for n in range(len(query), -1, -1) if self.count(query[len(query) - n :]))


def both(docs: list[list[int]], width: int, shards: int) -> tuple[Index, Brute]:
    return Index.of(docs, width=width, shards=shards), Brute(docs, shards, separator(TYPES[width]))
