"""Mixes an infini-gram model of a corpus into the target: w P_corpus + (1 - w) P_model.

Liu et al., "Infini-gram: Scaling Unbounded n-gram Language Models to a Trillion Tokens", 2024.
P_corpus is the distribution of tokens after the longest suffix of the text that occurs in an index.
w is one number for sparse estimates and another for the rest, or comes from a fitted forest. The
end of a document counts as the tokenizer's end id.

Law: the mixture, at every tree node with the text before it, then temperature and truncation.
Drafts keep this law exactly. Tokens that another constraint forbids stay forbidden; P_corpus is
renormalised over the rest. Needs: an index made with the target's tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.core.records import Sequence
from forerun.core.roles import Shaper
from forerun.core.sampling import log_softmax
from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build.manifest import read_manifest
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.index.query.interpolate import Forest, TwoWeights, Weigh, features
from forerun.ngrams.index.query.tokenizer_check import check_tokenizer
from forerun.registry import Corpus, File
from forerun.utils.numbers import whole

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

WEIGHTS = TwoWeights(0.5, 0.1)


class InfiniMix(Shaper):
    """Mixes the distribution of an n-gram index into that of the model.

    index: a folder made by `forerun index build`, or an open Index. weigh: weight of the corpus for
    sparse and for other estimates, e.g. 0.5+0.1; or a Forest or its file. context: longest suffix
    to search, in tokens. max_support: most occurrences to read; of more, an even sample.
    """

    def __init__(
        self,
        index: Corpus | Index | Path,
        weigh: tuple[float, ...] | Weigh | File = WEIGHTS,
        *,
        context: int = 64,
        max_support: int = 1000,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        whole("context", context)
        whole("max_support", max_support)
        self.index = index if isinstance(index, Index) else Index.open(index)
        if tokenizer is not None:
            check_tokenizer(self.index, tokenizer)
        self.weigh, self.context, self.max_support = _weights(weigh), context, max_support
        self.logits((0,), np.zeros(self.index.largest_id + 1))  # compiles the kernels

    @staticmethod
    def check_options(*, index: Any = None, weigh: Any = WEIGHTS, **_: Any) -> None:
        """Checks options before the index is opened. Raises ConfigError, DataError."""
        _weights(weigh)
        if isinstance(index, str | Path):
            read_manifest(Path(index))

    def start(self, seq: Sequence) -> tuple[int, ...]:
        """The last tokens."""
        return tuple(seq.tokens[-self.context :])

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)[-self.context :]

    def logits(self, state: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        """Log of the mixture, [V]."""
        if len(logits) <= self.index.largest_id:
            raise ConfigError(
                f"the index has token id {self.index.largest_id}, but the ids of this model end "
                f"at {len(logits) - 1}; build it with the model's tokenizer"
            )
        found = self.index.infgram_ntd(state, self.max_support)
        ids, counts = found.ids, found.counts
        is_free = ids < len(logits)  # the end of a document may have no id
        is_free[is_free] = logits[ids[is_free]] > -np.inf
        ids, counts = ids[is_free], counts[is_free]
        w = float(self.weigh(features(self.index, [state], [found]))[0]) if len(ids) else 0.0
        if not w:
            return logits
        with np.errstate(divide="ignore"):
            mixed = log_softmax(logits.astype(np.float64)) + np.log1p(-w)
            mixed[ids] = np.logaddexp(mixed[ids], np.log(w) + np.log(counts / counts.sum()))
        return mixed.astype(logits.dtype)


def _weights(given: tuple[float, ...] | Weigh | str | Path) -> Weigh:
    """Weights from two numbers or from the file of a forest. Raises ConfigError, DataError."""
    if isinstance(given, str | Path):
        if not Path(given).is_file():
            raise DataError(
                f"weigh must be two numbers, e.g. 0.5+0.1, or the file of a forest, got {given!r}"
            )
        return Forest.load(given)
    if not isinstance(given, tuple):
        return given
    if len(given) != 2:
        raise ConfigError(f"weigh needs two numbers, SPARSE+OTHER, e.g. 0.5+0.1; got {len(given)}")
    return TwoWeights(*given)
