"""Logits processors of transformers at the nodes of a draft tree.

Processors that depend on ids and scores only are called for each visited node. All others
may keep state: they are called once for every new token, in order, with the scores that `generate`
would pass, which needs batch size 1. In a batch they are refused, unless the caller declares that
they treat every row by itself and keep no state.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.constraints.base import Constraint
from forerun.core.records import Sequence
from forerun.core.roles import Shaper
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, LawError
from forerun.integrations.hf_constraints import check_no_constraint
from forerun.integrations.hf_inputs import batch_refusal

MODULE = "transformers.generation.logits_process"
WARPERS = (  # that `generate` appends last, in its order
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
)
PURE = {  # classes that depend on ids and scores only
    *WARPERS,
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "TopHLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "NoRepeatNGramLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "LogitNormalization",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "WatermarkLogitsProcessor",
}
STATEFUL = {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}
PREFIX = "PrefixConstrainedLogitsProcessor"  # runs a function of the user
MAX_KEPT = 32  # rows of ordered processors, enough for one step
Key = tuple[int, ...]  # batch row, then new tokens


class Place(NamedTuple):
    """A state: the text, and the state of the constraint after it."""

    key: Key
    inner: Any = None


def split_processors(processors: Any, do_sample: bool) -> tuple[Sampling, list[Any], list[Any]]:
    """The sampling parameters, the processors, and the warpers at the end of the list.

    A temperature goes into the parameters. The other warpers only remove tokens.
    """
    found, first = list(processors), len(processors)
    while do_sample and first and _class(found[first - 1]) in WARPERS:
        place = WARPERS.index(_class(found[first - 1]))
        if first < len(found) and place >= WARPERS.index(_class(found[first])):
            break
        first -= 1
    kept, warpers = found[:first], found[first:]
    heat = [w.temperature for w in warpers if _class(w) == WARPERS[0]]
    temperature = float(heat[0]) if heat else 1.0
    return Sampling(temperature=temperature if do_sample else 0.0), kept, warpers


def is_pure(processor: Any) -> bool:
    """Whether the result of a processor depends on ids and scores only."""
    return _class(processor) in PURE


def _class(processor: Any) -> str:
    """The class name of a processor of transformers; "" for a class from elsewhere."""
    kind = type(processor)
    return kind.__name__ if kind.__module__ == MODULE else ""


class Processors(Shaper):
    """Applies processors, a constraint of forerun, and warpers, in this order.

    Processors receive padded prompts and the expected batch size, since some use the row index.
    has_ended: whether a text (row, new tokens) is complete; nothing after it is emitted.
    keeps_rows: whether all scores are kept, for `rows`. is_rowwise: the caller declares that every
    processor treats each row by itself and keeps no state. Raises ConfigError for a batch with a
    processor of which this is not known.
    """

    def __init__(
        self,
        processors: list[Any],
        warpers: list[Any],
        prompts: Tensor,
        has_ended: Callable[[int, list[int]], bool],
        *,
        keeps_rows: bool = False,
        is_rowwise: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        self.processors, self.warpers, self.prompts = processors, warpers, prompts
        self.constraint, self.forbids = constraint, constraint is not None
        self.is_ordered = not all(map(is_pure, processors)) and len(prompts) == 1
        self.rows: dict[Key, np.ndarray] = {}  # scores without warpers
        self._has_ended, self._keeps_rows = has_ended, keeps_rows
        self._next: Key = ()  # state of the last call of ordered processors
        for processor in processors:
            check_no_constraint(processor, "logits_processor")
            if _class(processor) == PREFIX:
                check_no_constraint(processor._prefix_allowed_tokens_fn, _name(processor))
        for processor in processors if len(prompts) > 1 else ():
            is_stateful = _class(processor) in STATEFUL
            if is_stateful or not (is_rowwise or is_pure(processor)):
                name = _name(processor)
                raise batch_refusal(name, len(prompts), can_declare=not is_stateful)

    @property
    def applies(self) -> bool:
        """Whether scores differ from logits by more than a temperature, or are kept."""
        is_warm = all(_class(w) == WARPERS[0] for w in self.warpers)
        return bool(self.processors) or self.forbids or not is_warm or self._keeps_rows

    def past_scores(self, row: int, tokens: list[int]) -> tuple[Tensor, ...]:
        """The scores [B, V] of all positions of a text so far; other rows are copies."""
        keys = [(row, *tokens[:count]) for count in range(len(tokens))]
        found = [self.scores(Place(key), self.rows[key]) for key in keys]
        return tuple(scores.expand(len(self.prompts), -1) for scores in found)

    def start(self, seq: Sequence) -> Place:
        inner = None if self.constraint is None else self.constraint.start(seq)
        return Place((seq.index, *seq.generated), inner)

    def advance(self, state: Place, token: int) -> Place:
        own = self.constraint
        inner = None if own is None else own.advance(state.inner, token)
        return Place((*state.key, token), inner)

    def allows(self, state: Place, token: int) -> bool:
        return self.constraint is None or self.constraint.allows(state.inner, token)

    def mask(self, state: Place) -> np.ndarray | None:
        return None if self.constraint is None else self.constraint.mask(state.inner)

    def forced(self, state: Place) -> Many[int]:
        return () if self.constraint is None else self.constraint.forced(state.inner)

    def logits(self, state: Place, logits: np.ndarray) -> np.ndarray:
        """Scores [V]; a removed token has -inf. The temperature is not applied."""
        key = state.key
        if key not in self.rows:
            row, *tokens = key
            if self.is_ordered and self._has_ended(row, tokens):
                return logits
            scores = self._processed(key, logits)
            if np.isnan(scores).any():
                raise LawError(
                    f"a score of row {row} is NaN after {len(tokens)} new tokens: the model or a "
                    "logits processor overflowed; load it in float32, or set "
                    "remove_invalid_values=True"
                )
            if np.isneginf(scores).all():
                names = ", ".join(map(_name, self.processors)) or "the model"
                raise ConfigError(
                    f"all scores of row {row} are -inf after {len(tokens)} new tokens: no token is "
                    f"allowed by {names}; relax one of them"
                )
            if self.constraint is not None:
                scores = self.constraint.logits(state.inner, scores)
            self.rows[key] = scores
            if not self._keeps_rows and len(self.rows) > MAX_KEPT:
                del self.rows[next(iter(self.rows))]
        return self._warped(self.rows[key])

    def scores(self, state: Place, logits: np.ndarray) -> Tensor:
        """Scores [V] of `generate` at a visited node: processors, then all warpers."""
        self.logits(state, logits)
        row, ids = self.rows.get(state.key, logits), torch.zeros(1, 0, dtype=torch.int64)
        scores = torch.from_numpy(row)[None]
        for warper in self.warpers:
            scores = warper(ids, scores)
        return scores[0]

    def _processed(self, key: Key, logits: np.ndarray) -> np.ndarray:
        row, *tokens = key
        if not self.processors:
            return logits.astype(np.float32)
        if self.is_ordered:
            if self._next and key[:-1] != self._next:
                names = ", ".join(_name(p) for p in self.processors if not is_pure(p))
                raise ConfigError(
                    f"{names} must be called once per token, in order, and this drafter or "
                    "verifier asks for other nodes; use the defaults or plain generate"
                )
            self._next = key
        return apply(self.processors, self.prompts, row, tokens, logits)

    def _warped(self, row: np.ndarray) -> np.ndarray:
        """The row with -inf for tokens that warpers remove, as transformers' code decides."""
        if all(_class(w) == WARPERS[0] for w in self.warpers):
            return row
        ids, places = torch.zeros(1, 0, dtype=torch.int64), None
        scores = torch.from_numpy(row)[None]
        for warper in self.warpers:
            scores = warper(ids, scores)
            if places is None and _class(warper) == "TopKLogitsWarper":  # the others sort
                finite = torch.isfinite(scores[0]).nonzero()[:, 0]
                # their sort is not stable: among equal scores its order depends on the whole row
                if len(scores[0, finite].unique()) == len(finite):
                    scores, places = scores[:, finite], finite
        kept = torch.isfinite(scores[0])
        index = kept.nonzero()[:, 0] if places is None else places[kept]
        found = np.full_like(row, -np.inf)
        found[index.numpy()] = row[index.numpy()]
        return found


def apply(
    processors: list[Any], prompts: Tensor, row: int, tokens: list[int], logits: np.ndarray
) -> np.ndarray:
    """Processed scores [V] of one batch row after its prompt and `tokens`."""
    ids = prompts
    if tokens:
        made = torch.tensor(tokens, dtype=prompts.dtype, device=prompts.device)
        ids = torch.cat([prompts[row], made]).expand(len(prompts), -1)
    wide = torch.from_numpy(logits.astype(np.float32)).to(prompts.device)
    scores = wide.repeat(len(prompts), 1)
    for processor in processors:
        scores = processor(ids, scores)
    return scores[row].float().cpu().numpy()


def _name(processor: Any) -> str:
    """The name of a processor: of its function, or of its class."""
    if _class(processor) == PREFIX:
        return "prefix_allowed_tokens_fn"
    return f"logits processor {getattr(processor, '__name__', type(processor).__name__)}"
