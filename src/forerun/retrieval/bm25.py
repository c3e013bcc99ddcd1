"""BM25 baseline over titles and bodies, by the package bm25s (extra `retrieval`)."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from forerun.errors import ConfigError, install_extra
from forerun.retrieval.passages import Passage
from forerun.utils.numbers import whole


class BM25:
    """BM25 index (k1 1.5, b 0.75, Lucene's form) without English stop words."""

    def __init__(self, passages: Many[Passage]) -> None:
        try:
            import bm25s
        except ImportError:
            raise ConfigError(
                f"BM25 needs the package bm25s; {install_extra('retrieval')}"
            ) from None
        self._bm25s, self._count = bm25s, len(passages)
        self._index = bm25s.BM25()
        self._index.index(
            self._words([f"{p.title} {p.body}" for p in passages]), show_progress=False
        )

    def search(self, queries: Many[str], k: int = 100) -> np.ndarray:
        """Passage numbers of the best k per query, best first. int64 [queries, k]."""
        found, _ = self._index.retrieve(
            self._words(queries), k=min(whole("k", k), self._count), show_progress=False
        )
        return np.asarray(found, np.int64)

    def _words(self, texts: Many[str]) -> object:
        return self._bm25s.tokenize(list(texts), stopwords="en", show_progress=False)
