"""Exact counts of all n-grams of a text up to some order: a trie in three flat arrays.

Row 0 is the root; below it every distinct n-gram has a row, level by level, each level in the order
of its parents and then of its last token, so that the successors of a context are neighbours.
`first` exists for rows that may have successors, hence not for the longest n-grams. From the counts
follow P_n(x | c) = (C_n(c, x) + k) / (N_n(c) + k V), with c the last n - 1 tokens, and the linear
mixture of P_1 .. P_N over the orders whose context was seen. 12 to 28 bytes a distinct n-gram.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from forerun.core.records import Snapshot
from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.counts import corpus
from forerun.state import array_file

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

KIND = "n-gram model"
WEIGHTS = (0.1, 0.3, 0.6)  # of orders 1, 2, 3, as published for style
SMOOTHING = 1e-3
MOST_ORDERS = 16


class Row(NamedTuple):
    """What followed a context."""

    ids: np.ndarray  # int32 [m], ascending
    counts: np.ndarray  # int64 [m]

    @property
    def total(self) -> int:
        """N(c)."""
        return int(self.counts.sum())


@dataclass(frozen=True, eq=False)
class NgramModel:
    """Made by `count`, `of_files` or `load`; nothing changes it."""

    tokens: np.ndarray  # int32 [R], the last token of each row's n-gram; -1 for the root
    counts: np.ndarray  # int64 [R], how often it occurs; of the root: all tokens
    first: np.ndarray  # int64 [inner + 1], the children of row r are first[r] to first[r + 1]
    order: int
    vocab_size: int
    tokenizer: str = ""  # fingerprint of the one that made the ids; "" is unknown

    @classmethod
    def count(
        cls,
        documents: Iterable[np.ndarray],
        *,
        vocab_size: int,
        order: int = 3,
        tokenizer: str = "",
    ) -> NgramModel:
        """Counts documents of token ids; no n-gram crosses a border. Raises DataError if empty."""
        if not 1 <= order <= MOST_ORDERS:
            raise ConfigError(f"order must be in 1..{MOST_ORDERS}, got {order}; 3 is usual")
        kept = [np.asarray(d, dtype=np.int64) for d in documents if len(d)]
        if not kept:
            raise DataError(
                "the corpus is empty or blank: expected at least one token, got none; give a file "
                "with text"
            )
        text = np.concatenate(kept)
        if not 0 <= text.min() <= text.max() < vocab_size:
            raise DataError(
                f"the corpus holds token {int(text.max())}, but the ids of this model end at "
                f"{vocab_size - 1}; tokenise it with the model's own tokenizer"
            )
        room = np.concatenate([np.arange(len(d), 0, -1) for d in kept])
        tokens, counts, first = _trie(text, room, vocab_size, order)
        return cls(tokens, counts, first, order, vocab_size, tokenizer)

    @classmethod
    def of_files(
        cls, paths: Many[str | Path], tokenizer: Tokenizer | None, *, order: int = 3
    ) -> NgramModel:
        """Counts of text files (`corpora.documents`), or the model in one file of `save`.

        Raises ConfigError without a tokenizer, DataError for a file that cannot be used.
        """
        if len(paths) == 1 and is_saved(Path(paths[0])):
            return cls.load(Path(paths[0]), tokenizer)
        documents = corpus.tokenised(paths, tokenizer)
        size = tokenizer.vocab_size if tokenizer else 0
        code = corpus.fingerprint(tokenizer)
        return cls.count(documents, vocab_size=size, order=order, tokenizer=code)

    def save(self, path: Path | str) -> None:
        """Writes all counts to one file, whole or not at all."""
        arrays = {"tokens": self.tokens, "counts": self.counts, "first": self.first}
        settings = {"order": self.order, "vocab_size": self.vocab_size}
        counts = {"tokens": self.num_tokens, "n-grams": len(self)}
        array_file.write(
            path, Snapshot(KIND, arrays, settings, counts), array_file.Origin(self.tokenizer)
        )

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer | None = None) -> NgramModel:
        """What `save` wrote. Raises DataError if damaged, or made with another tokenizer."""
        snapshot, origin = array_file.read(path, KIND)
        ours = corpus.fingerprint(tokenizer)
        if ours and origin.tokenizer and ours != origin.tokenizer:
            raise DataError(
                f"{path} was counted with another tokenizer (fingerprint {origin.tokenizer[:12]}, "
                f"the target's is {ours[:12]}); count the text anew with the target's"
            )
        tokens, counts, first = (snapshot.arrays[n] for n in ("tokens", "counts", "first"))
        order, vocab_size = snapshot.settings["order"], snapshot.settings["vocab_size"]
        return cls(tokens, counts, first, order, vocab_size, origin.tokenizer)

    def __len__(self) -> int:
        """Distinct n-grams of all orders."""
        return len(self.tokens) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the corpus."""
        return int(self.counts[0])

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.counts.nbytes + self.first.nbytes + self.totals.nbytes

    @cached_property
    def totals(self) -> np.ndarray:
        """N(c) of every row that may have successors; int64 [inner]."""
        sums = np.concatenate([[0], np.cumsum(self.counts)])
        return np.diff(sums[self.first])

    @cached_property
    def largest_id(self) -> int:
        """The largest token id of the corpus."""
        return int(self.tokens.max())

    def row(self, context: Many[int]) -> Row | None:
        """What followed exactly this context; None where nothing did, or it is too long."""
        at = self._row(context)
        if at < 0 or at >= len(self.totals) or not self.totals[at]:
            return None
        span = slice(self.first[at], self.first[at + 1])
        return Row(self.tokens[span], self.counts[span])

    def knows(self, ngram: Many[int]) -> bool:
        """Whether the corpus holds these tokens in a row; at most `order` of them."""
        return self._row(ngram) >= 0

    def probs(self, context: Many[int], *, smoothing: float = SMOOTHING) -> np.ndarray | None:
        """P_n(. | context), n one more than its length, smoothed over the vocabulary; [V].

        None where the context has no successor.
        """
        row = self.row(context)
        if row is None:
            return None
        total = row.total + smoothing * self.vocab_size
        dense = np.full(self.vocab_size, smoothing / total)
        dense[row.ids] = (row.counts + smoothing) / total
        return dense

    def mixture(
        self,
        context: Many[int],
        token: int,
        *,
        weights: Many[float] = WEIGHTS,
        smoothing: float = SMOOTHING,
    ) -> float:
        """P_mix(token | context): weighted mean of P_n over the orders whose context was seen.

        Weights are those of orders 1, 2 ..; 1 / V where no order has an estimate.
        """
        parts, mass = 0.0, 0.0
        for length, weight in enumerate(weights[: self.order]):
            if length > len(context) or not weight:
                continue
            at = self._row(context[len(context) - length :])
            if at < 0 or not self.totals[at]:
                continue
            child = child_of(self.tokens, self.first, at, token)
            found = self.counts[child] if child >= 0 else 0
            share = (found + smoothing) / (self.totals[at] + smoothing * self.vocab_size)
            parts, mass = parts + weight * float(share), mass + weight
        return parts / mass if mass else 1.0 / self.vocab_size

    def perplexity(self, tokens: Many[int], num_before: int = 0, **options: object) -> float:
        """exp of the mean of -log P_mix over tokens[num_before:], each after what precedes it."""
        if num_before >= len(tokens):
            raise DataError("perplexity needs at least one token, got none")
        places = range(num_before, len(tokens))
        reach = self.order - 1
        probs = [
            self.mixture(tokens[max(0, i - reach) : i], tokens[i], **options)  # type: ignore[arg-type]
            for i in places
        ]
        return float(np.exp(-np.mean(np.log(probs))))

    def shares(self, text: Many[int], candidates: np.ndarray, weights: Many[float]) -> np.ndarray:
        """sum_m weights[m - 1] C(last m tokens, v) / N(last m tokens) of candidates v; float64 [n].

        A context that was not seen contributes nothing; nothing is smoothed.
        """
        known = np.asarray(weights[: self.order - 1], dtype=np.float64)
        last = np.asarray(text[max(0, len(text) - len(known)) :], dtype=np.int64)
        arrays = self.tokens, self.counts, self.first, self.totals
        return shares(*arrays, last, candidates, known)

    def _row(self, context: Many[int]) -> int:
        return descend(self.tokens, self.first, np.asarray(context, dtype=np.int64))


def is_saved(path: Path) -> bool:
    """Whether a file begins as those of `NgramModel.save` do; no text file does.

    A pipe is not looked into: what was read would be gone.
    """
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(9)
    except OSError:  # whoever reads it as text says why
        return False
    return len(head) == 9 and head[8:] == b"{" and b"\0" in head[:8]


@njit(cache=True, nogil=True)
def child_of(tokens: np.ndarray, first: np.ndarray, row: int, token: int) -> int:
    """The row of one more token after a row; -1 if there is none."""
    if row >= len(first) - 1:
        return -1
    low, stop = first[row], first[row + 1]
    high = stop
    while low < high:
        middle = (low + high) >> 1
        if tokens[middle] < token:
            low = middle + 1
        else:
            high = middle
    return low if low < stop and tokens[low] == token else -1


@njit(cache=True, nogil=True)
def descend(tokens: np.ndarray, first: np.ndarray, context: np.ndarray) -> int:
    """The row of an n-gram; -1 if it never occurs."""
    row = 0
    for token in context:
        row = child_of(tokens, first, row, token)
        if row < 0:
            break
    return row


@njit(cache=True, nogil=True)
def shares(
    tokens: np.ndarray,
    counts: np.ndarray,
    first: np.ndarray,
    totals: np.ndarray,
    text: np.ndarray,
    candidates: np.ndarray,
    weights: np.ndarray,
) -> np.ndarray:
    """As `NgramModel.shares`."""
    found = np.zeros(len(candidates))
    for length in range(1, min(len(weights), len(text)) + 1):
        row = descend(tokens, first, text[len(text) - length :])
        if row < 0 or totals[row] == 0:
            continue
        for i in range(len(candidates)):
            child = child_of(tokens, first, row, candidates[i])
            if child >= 0:
                found[i] += weights[length - 1] * counts[child] / totals[row]
    return found


def warm_up() -> None:
    """Compiles the kernels, or loads them from the cache."""
    model = NgramModel.count([np.zeros(3, np.int32)], vocab_size=1)
    model.mixture((0,), 0)
    model.shares((0,), np.zeros(1, np.int64), (1.0,))


def _trie(
    text: np.ndarray, room: np.ndarray, vocab_size: int, order: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, counts and first children of all rows; room: tokens left in each place's document."""
    tokens, counts = [np.array([-1])], [np.array([len(text)])]
    starts, above, num_above, num_rows = [], np.zeros(len(text), np.int64), 1, 1
    for length in range(order):
        at = np.flatnonzero(room > length)
        keys = above[at] * vocab_size + text[at + length]  # the row above, then the next token
        found, where, num = np.unique(keys, return_inverse=True, return_counts=True)
        starts.append(num_rows + np.searchsorted(found // vocab_size, np.arange(num_above)))
        tokens.append(found % vocab_size)
        counts.append(num)
        above = np.zeros(len(text), np.int64)
        above[at] = where
        num_above, num_rows = len(found), num_rows + len(found)
    first = np.concatenate([*starts, [num_rows]])
    return np.concatenate(tokens).astype(np.int32), np.concatenate(counts), first
