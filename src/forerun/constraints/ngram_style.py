"""n-gram style control: adds n-gram log-probabilities of a corpus to the logits.

"Limits of n-gram Style Control for LLMs via Logit-Space Injection", 2026. The logits z of a frozen
model become z_i += lambda sum_n w_n log P_n(i | c_n) for every token i that the corpus has after
the last n - 1 tokens, n = 1, 2, 3; other logits stay. This form, "paper", only lowers logits, as
log P is never positive: tokens of the corpus lose against others. The form "floored" adds
log P_n(i | c_n) - log floor_n, where floor_n = k / (N_n + k V) is the share of an unseen token, so
tokens of the corpus gain by their counts.

Law: softmax of the changed logits, at every tree node with the two tokens before it. Drafts keep
this law exactly. Needs: counts made with the target's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forerun.core.records import Sequence
from forerun.core.roles import Shaper
from forerun.errors import ConfigError, UnknownName
from forerun.ngrams.index.counts.trie import (
    SMOOTHING,
    WEIGHTS,
    NgramModel,
    Row,
    check_weights,
)
from forerun.registry import Corpus
from forerun.utils.numbers import finite, whole

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

PAPER, FLOORED = "paper", "floored"
FORMS = (FLOORED, PAPER)
STRENGTH = 0.3
MAX_CACHED_CONTEXTS = 1024


class Shift(NamedTuple):
    """The change of the logits in a context."""

    ids: np.ndarray  # int64 [m], ascending
    values: np.ndarray  # float64 [m]


class NgramStyle(Shaper):
    """Adds lambda times the weighted n-gram log-probabilities of a corpus to the logits.

    style: text files, the file of a saved n-gram model, or an NgramModel; text needs the target's
    tokenizer. strength: lambda, 0 to 1. form: "floored" or "paper". weights: weights of orders 1,
    2, 3. smoothing: k. entries: most successors of a context, the most frequent ones.
    """

    def __init__(
        self,
        style: tuple[Corpus, ...] | NgramModel | str | Path | Many[str | Path],
        *,
        strength: float = STRENGTH,
        form: str = FLOORED,
        weights: tuple[float, ...] = WEIGHTS,
        smoothing: float = SMOOTHING,
        entries: int = 512,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        check(strength, form)
        check_weights(weights)
        finite("smoothing", smoothing, 0, is_open=True)
        whole("entries", entries)
        if not isinstance(style, NgramModel):
            paths = [style] if isinstance(style, str | Path) else list(style)
            style = NgramModel.of_files(paths, tokenizer, order=len(weights))
        if style.order < len(weights):
            raise ConfigError(
                f"the model counts n-grams up to {style.order}, but there are {len(weights)} "
                f"weights; count it with order={len(weights)}, or give fewer weights"
            )
        self.model, self.strength, self.form = style, float(strength), form
        self.weights, self.smoothing, self.entries = tuple(weights), smoothing, entries
        self._reach = len(self.weights) - 1  # tokens of a state
        self._shifts: dict[tuple[int, ...], Shift] = {}
        self.shift(())  # compiles the kernels

    @staticmethod
    def check_options(*, strength: float = STRENGTH, form: str = FLOORED, **_: Any) -> None:
        """Checks options before files are read. Raises ConfigError."""
        check(strength, form)

    def start(self, seq: Sequence) -> tuple[int, ...] | None:
        """The last tokens; None at strength 0, which changes nothing."""
        return self._last(tuple(seq.tokens)) if self.strength else None

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return self._last((*state, token))

    def logits(self, state: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        if len(logits) <= self.model.largest_id:
            raise ConfigError(
                f"the style has token {self.model.largest_id}, but the ids of this model end at "
                f"{len(logits) - 1}; count the text with the model's tokenizer"
            )
        shift = self.shift(state)
        shaped = logits.copy()
        shaped[shift.ids] += shift.values.astype(logits.dtype)
        return shaped

    def shift(self, context: tuple[int, ...]) -> Shift:
        """lambda sum_n w_n log P_n(i | context) of listed i; minus log floor_n if "floored"."""
        if context not in self._shifts:
            if len(self._shifts) >= MAX_CACHED_CONTEXTS:
                del self._shifts[next(iter(self._shifts))]  # the oldest
            self._shifts[context] = self._shift(context)
        return self._shifts[context]

    def _shift(self, context: tuple[int, ...]) -> Shift:
        parts = []
        for length, weight in enumerate(self.weights[: len(context) + 1]):
            row = self.model.row(context[len(context) - length :])
            if row is not None and weight:
                parts.append((row, weight))
        ids = [_best(row, self.entries) for row, _ in parts]
        values = [w * self._gain(row, at) for (row, w), at in zip(parts, ids, strict=True)]
        listed = [row.ids[at] for (row, _), at in zip(parts, ids, strict=True)]
        none = np.zeros(0)
        found, where = np.unique(np.concatenate([none.astype(int), *listed]), return_inverse=True)
        added = np.bincount(where, np.concatenate([none, *values]), minlength=len(found))
        return Shift(found, self.strength * added)

    def _gain(self, row: Row, at: np.ndarray) -> np.ndarray:
        """log P_n of the row's entries at `at`; minus log floor_n if "floored"."""
        k, counts = self.smoothing, row.counts[at]
        if self.form == FLOORED:
            return np.log((counts + k) / k)
        return np.log((counts + k) / (row.total + k * self.model.vocab_size))

    def _last(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tokens[max(0, len(tokens) - self._reach) :]


def check(strength: float, form: str = FLOORED) -> None:
    """Raises ConfigError for a lambda outside [0, 1] or an unknown form."""
    finite("strength (lambda; usually 0.1 to 0.3)", strength, 0, 1)
    if form not in FORMS:
        raise UnknownName.of("form of n-gram style", form, FORMS)


def _best(row: Row, most: int) -> np.ndarray:
    """Indices of the `most` largest counts; ties: the lowest ids; int64."""
    if len(row.ids) <= most:
        return np.arange(len(row.ids))
    return np.lexsort((row.ids, -row.counts))[:most]
