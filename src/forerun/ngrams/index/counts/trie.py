"""Exact n-gram counts of a text up to a given order, as a trie in three flat arrays.

Row 0 is the root. Every distinct n-gram has a row, level by level. A level is sorted by parent and
then by last token, so the successors of a context are contiguous. `first` has no entries for the
longest n-grams. P_n(x | c) = (C_n(c, x) + k) / (N_n(c) + k V), with c the last n - 1 tokens. The
mixture is linear in P_1 .. P_N over the orders with a seen context. 12 to 28 bytes per n-gram.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forerun.core.records import Snapshot
from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.counts import corpus
from forerun.state import array_file
from forerun.utils.jit import compiled
from forerun.utils.numbers import finite, token_ids, whole

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

KIND = "n-gram model"
WEIGHTS = (0.1, 0.3, 0.6)  # of orders 1, 2, 3, as published for style
SMOOTHING = 1e-3
MAX_ORDER = 16


class Row(NamedTuple):
    """The successors of a context."""

    ids: np.ndarray  # int32 [m], ascending
    counts: np.ndarray  # int64 [m]

    @property
    def total(self) -> int:
        """N(c), the sum of the counts."""
        return int(self.counts.sum())


@dataclass(frozen=True, eq=False)
class NgramModel:
    """Immutable n-gram counts, made by `count`, `of_files` or `load`."""

    tokens: np.ndarray  # int32 [R], last token per row; -1 for the root
    counts: np.ndarray  # int64 [R], occurrences per row; of the root: all tokens
    first: np.ndarray  # int64 [inner + 1], the children of row r are first[r] to first[r + 1]
    order: int
    vocab_size: int
    tokenizer: str = ""  # fingerprint of the tokenizer; "" is unknown

    @classmethod
    def count(
        cls,
        documents: Iterable[np.ndarray],
        *,
        vocab_size: int,
        order: int = 3,
        tokenizer: str = "",
    ) -> NgramModel:
        """Counts n-grams within documents of token ids. Raises DataError if there are none."""
        whole("order (usually 3)", order, 1, MAX_ORDER)
        kept = [token_ids(d) for d in documents if len(d)]
        whole("vocab_size", vocab_size)
        if not kept:
            raise DataError(
                "the corpus is empty or blank: expected at least one token, got none; give a file "
                "with text"
            )
        text = np.concatenate(kept)
        if not 0 <= text.min() <= text.max() < vocab_size:
            wrong = int(text.min() if text.min() < 0 else text.max())
            raise DataError(
                f"the corpus has token id {wrong}, the model's ids are 0 to {vocab_size - 1}; "
                "tokenize the corpus with the model's tokenizer"
            )
        left = np.concatenate([np.arange(len(d), 0, -1) for d in kept])
        tokens, counts, first = _trie(text, left, vocab_size, order)
        return cls(tokens, counts, first, order, vocab_size, tokenizer)

    @classmethod
    def of_files(
        cls, paths: Many[str | Path], tokenizer: Tokenizer | None, *, order: int = 3
    ) -> NgramModel:
        """Counts text files (`corpus.documents`), or loads one file of `save`.

        Raises ConfigError without a tokenizer, DataError for an unreadable file.
        """
        if len(paths) == 1 and is_saved(Path(paths[0])):
            return cls.load(Path(paths[0]), tokenizer)
        documents = corpus.tokenised(paths, tokenizer)
        size = tokenizer.vocab_size if tokenizer else 0
        code = corpus.fingerprint(tokenizer)
        return cls.count(documents, vocab_size=size, order=order, tokenizer=code)

    def save(self, path: Path | str) -> None:
        """Writes all counts to one file atomically."""
        arrays = {"tokens": self.tokens, "counts": self.counts, "first": self.first}
        settings = {"order": self.order, "vocab_size": self.vocab_size}
        counts = {"tokens": self.num_tokens, "n-grams": len(self)}
        array_file.write(
            path, Snapshot(KIND, arrays, settings, counts), array_file.Origin(self.tokenizer)
        )

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer | None = None) -> NgramModel:
        """Loads a file of `save`. Raises DataError if damaged, or made with another tokenizer."""
        snapshot, origin = array_file.read(path, KIND)
        ours = corpus.fingerprint(tokenizer)
        if ours and origin.tokenizer and ours != origin.tokenizer:
            raise DataError(
                f"{path} was counted with another tokenizer (fingerprint {origin.tokenizer[:12]}, "
                f"the target's is {ours[:12]}); count the text again with the target's tokenizer"
            )
        tokens, counts, first = (snapshot.arrays[n] for n in ("tokens", "counts", "first"))
        order, vocab_size = snapshot.settings["order"], snapshot.settings["vocab_size"]
        return cls(tokens, counts, first, order, vocab_size, origin.tokenizer)

    def __len__(self) -> int:
        """Number of distinct n-grams of all orders."""
        return len(self.tokens) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the corpus."""
        return int(self.counts[0])

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.counts.nbytes + self.first.nbytes + self.totals.nbytes

    @cached_property
    def totals(self) -> np.ndarray:
        """N(c) per row below the highest order; int64 [inner]."""
        sums = np.concatenate([[0], np.cumsum(self.counts)])
        return np.diff(sums[self.first])

    @cached_property
    def largest_id(self) -> int:
        """The largest token id of the corpus."""
        return int(self.tokens.max())

    def row(self, context: Many[int]) -> Row | None:
        """The successors of exactly this context; None if there are none or it is too long."""
        at = self._row(context)
        if at < 0 or at >= len(self.totals) or not self.totals[at]:
            return None
        span = slice(self.first[at], self.first[at + 1])
        return Row(self.tokens[span], self.counts[span])

    def knows(self, ngram: Many[int]) -> bool:
        """Whether the n-gram of at most `order` tokens occurs in the corpus."""
        return self._row(ngram) >= 0

    def probs(self, context: Many[int], *, smoothing: float = SMOOTHING) -> np.ndarray | None:
        """P_n(. | context), n = len(context) + 1, smoothed over the vocabulary; [V].

        None if the context has no successors.
        """
        finite("smoothing", smoothing, 0)
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
        """P_mix(token | context): weighted mean of P_n over the orders with a seen context.

        weights: of orders 1, 2, ... The result is 1 / V if no context was seen.
        """
        check_weights(weights)
        finite("smoothing", smoothing, 0)
        token = operator.index(token)
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
        """exp of the mean of -log P_mix over tokens[num_before:], given the tokens before each."""
        if whole("num_before", num_before, 0) >= len(tokens):
            raise DataError("perplexity needs at least one token, got none; use a longer text")
        positions = range(num_before, len(tokens))
        reach = self.order - 1
        probs = [
            self.mixture(tokens[max(0, i - reach) : i], tokens[i], **options)  # type: ignore[arg-type]
            for i in positions
        ]
        return float(np.exp(-np.mean(np.log(probs))))

    def shares(self, text: Many[int], candidates: np.ndarray, weights: Many[float]) -> np.ndarray:
        """sum_m weights[m - 1] C(last m tokens, v) / N(last m tokens) of candidates v; float64 [n].

        Without smoothing; an unseen context contributes 0.
        """
        check_weights(weights)
        known = np.asarray(weights[: self.order - 1], dtype=np.float64)
        last = token_ids(text[max(0, len(text) - len(known)) :])
        arrays = self.tokens, self.counts, self.first, self.totals
        return shares(*arrays, last, token_ids(candidates), known)

    def _row(self, context: Many[int]) -> int:
        return descend(self.tokens, self.first, token_ids(context))


def check_weights(weights: Many[float]) -> None:
    """Raises ConfigError for no weights, and for weights that are negative or not finite."""
    if not len(weights):
        raise ConfigError("expected at least one weight, got none; give one per order")
    for weight in weights:
        finite("a weight", weight, 0)


def is_saved(path: Path) -> bool:
    """Whether a file begins like a file of `NgramModel.save`; text files do not.

    A pipe is not read, because its content could not be read again.
    """
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(9)
    except OSError:  # reading it as text raises the error
        return False
    return len(head) == 9 and head[8:] == b"{" and b"\0" in head[:8]


@compiled
def child_of(tokens: np.ndarray, first: np.ndarray, row: int, token: int) -> int:
    """The row of a row's successor `token`; -1 if there is none."""
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


@compiled
def descend(tokens: np.ndarray, first: np.ndarray, context: np.ndarray) -> int:
    """The row of an n-gram; -1 if it does not occur."""
    row = 0
    for token in context:
        row = child_of(tokens, first, row, token)
        if row < 0:
            break
    return row


@compiled
def shares(
    tokens: np.ndarray,
    counts: np.ndarray,
    first: np.ndarray,
    totals: np.ndarray,
    text: np.ndarray,
    candidates: np.ndarray,
    weights: np.ndarray,
) -> np.ndarray:
    """The kernel of `NgramModel.shares`."""
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
    text: np.ndarray, left: np.ndarray, vocab_size: int, order: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, counts and first children of all rows; left: tokens to the end of the document."""
    tokens, counts = [np.array([-1])], [np.array([len(text)])]
    starts, above, num_above, num_rows = [], np.zeros(len(text), np.int64), 1, 1
    for length in range(order):
        at = np.flatnonzero(left > length)
        keys = above[at] * vocab_size + text[at + length]  # parent row, next token
        found, where, num = np.unique(keys, return_inverse=True, return_counts=True)
        starts.append(num_rows + np.searchsorted(found // vocab_size, np.arange(num_above)))
        tokens.append(found % vocab_size)
        counts.append(num)
        above = np.zeros(len(text), np.int64)
        above[at] = where
        num_above, num_rows = len(found), num_rows + len(found)
    first = np.concatenate([*starts, [num_rows]])
    return np.concatenate(tokens).astype(np.int32), np.concatenate(counts), first
