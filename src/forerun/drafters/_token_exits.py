"""Exits per token of a sorted draft: each token is drawn from the first sub-model that is sure.

Kavehzadeh et al., "S2D: Sorted Speculative Decoding", 2024. A sub-model is sure if its largest
probability at temperature 1 is above `confidence`; the last one always drafts. The choice depends
on the text and the draft model only, so q is the distribution of that sub-model. Each sub-model has
its own KV cells: tokens that left earlier are read in one pass when a later token needs them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from forerun.core.growing import Path
from forerun.core.records import Sequence
from forerun.drafters._draft_runner import ModelSource
from forerun.drafters._sub_model import probs
from forerun.errors import ConfigError
from forerun.models.sub_models import Exits, sub_runner

if TYPE_CHECKING:
    from forerun.runner.model_runner import ModelRunner


class ExitSource(ModelSource):
    """q of the first sub-model that is sure. runners: the sub-models, in ascending order of depth.

    `counts` holds how many distributions each sub-model gave: the histogram of the exits.
    """

    def __init__(
        self, runners: Many[ModelRunner], text: Many[int], confidence: float, is_tree: bool
    ) -> None:
        if not 0 <= confidence <= 1:
            raise ConfigError(f"confidence must be from 0 to 1, got {confidence}; e.g. 0.5")
        super().__init__(runners[-1], is_tree)
        self.runners, self.text, self.confidence = runners, text, confidence
        self.lower = [ModelSource(runner, is_tree) for runner in runners[:-1]]
        self.counts = np.zeros(len(runners), np.int64)
        self._passes: dict[ModelRunner, float] = {}

    @classmethod
    def of(
        cls, model: ModelRunner, layers: int | str, confidence: float, is_tree: bool
    ) -> ExitSource:
        """The sub-models of a sorted draft, up to `layers` unless that is "auto".

        Raises ConfigError for a draft that is not sorted, or that has no such sub-model.
        """
        exits: Exits | None = getattr(model, "exits", None)
        if exits is None:
            raise ConfigError(
                "confidence needs a sorted draft, and this one has no exits; make one with "
                "`forerun train sorted`, or leave confidence out"
            )
        deepest = exits.depths[-1] if layers == "auto" else layers
        if deepest not in exits.depths:
            raise ConfigError(
                f"layers must be one of the exits {', '.join(map(str, exits.depths))} together "
                f"with confidence, got {layers}"
            )
        used = exits.depths[: exits.depths.index(int(deepest)) + 1]
        return cls([sub_runner(model, depth) for depth in used], exits.text, confidence, is_tree)

    def fit(self, vocab_size: int) -> None:
        super().fit(vocab_size)
        for source in self.lower:
            source.fit(vocab_size)

    def logits(self, requests: Many[tuple[Sequence, Path]]) -> np.ndarray:
        found: dict[int, np.ndarray] = {}
        left = list(range(len(requests)))
        for depth, source in enumerate(self.lower):
            rows = source.logits([requests[i] for i in left])
            is_sure = highest(rows) > self.confidence
            self.counts[depth] += int(is_sure.sum())
            found |= {i: row for i, row, sure in zip(left, rows, is_sure, strict=True) if sure}
            left = [i for i in left if i not in found]
            if not left:
                break
        if left:
            self.counts[-1] += len(left)
            rows = super().logits([requests[i] for i in left])
            found |= dict(zip(left, rows, strict=True))
        return np.stack([found[i] for i in range(len(requests))])

    def num_unread(self, seq: Sequence) -> int:
        """Tokens of a text that the first sub-model has not read; others may never need them."""
        return self.lower[0].num_unread(seq) if self.lower else super().num_unread(seq)

    def release(self, seq: Sequence) -> None:
        super().release(seq)
        for source in self.lower:
            source.release(seq)

    def passes_per_token(self) -> dict[ModelRunner, float]:
        """Passes of each sub-model per drafted token, counted on the text; 1 for the first."""
        if not self._passes:
            known = [token for token in self.text if token < self.inner.vocab_size]
            left = np.ones(len(known), bool)
            for runner in self.runners:
                self._passes[runner] = float(left.mean())
                left &= probs(runner, known).max(axis=1) <= self.confidence
        return self._passes


def highest(logits: np.ndarray) -> np.ndarray:
    """The largest probability of each row at temperature 1."""
    return 1.0 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, dtype=np.float64)
