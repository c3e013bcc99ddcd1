"""Stopping criteria of transformers, checked after every token of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forerun.core.records import Sequence
from forerun.engine.stopping import Stops
from forerun.errors import ConfigError
from forerun.models.hf_rope import UNLIMITED

MODULE = "transformers.generation.stopping_criteria"
ROWWISE = ("MaxTimeCriteria", "StopStringCriteria")  # called here, and without state
Scores = Callable[[int, list[int]], tuple[Tensor, ...]]


class Criteria(Stops):
    """The list that `generate` has prepared, in which criteria of the user replace its own.

    End tokens and the length limit are read from the list; the other criteria are called once for
    each text, with the ids of the row in a batch of the expected size. scores: returns the scores
    of a text (row, new tokens) for criteria that read them. is_rowwise: the caller declares that
    every criterion treats each row by itself and keeps no state. Raises ConfigError for a batch
    with a criterion of which this is not known.
    """

    def __init__(
        self,
        criteria: Any,
        prompts: Tensor,
        scores: Scores | None = None,
        *,
        is_rowwise: bool = False,
    ) -> None:
        listed = list(criteria or ())
        ends = [_ids(c) for c in listed if _is(c, "EosTokenCriteria")]
        super().__init__([token for ids in ends for token in ids])
        limits = [int(c.max_length) for c in listed if _is(c, "MaxLengthCriteria")]
        self.max_length = min(limits, default=None)
        plain = ("EosTokenCriteria", "MaxLengthCriteria")
        self.others = [c for c in listed if not any(_is(c, name) for name in plain)]
        if len(prompts) > 1 and not is_rowwise:
            _check_rowwise(self.others, len(prompts))
        # `generate` pads finished rows only then; otherwise they go on until all rows have ended
        self.has_ends = any(hasattr(c, "eos_token_id") for c in listed)
        self.is_length_only = False  # for rows that go on
        self._prompts, self.scores = prompts, scores
        self._done: dict[tuple[int, tuple[int, ...]], bool] = {}

    @property
    def max_new_tokens(self) -> int:
        """The most new tokens of a text; at least 1."""
        length = self._prompts.shape[1]
        return UNLIMITED if self.max_length is None else max(1, self.max_length - length)

    def cut(self, seq: Sequence, tokens: list[int]) -> list[int]:
        if self.is_length_only:
            kept = tokens[: seq.num_left]
            seq.finish = "length" if len(kept) == seq.num_left else None
            return kept
        for count in range(1, len(tokens) + 1) if self.others else ():
            if self.is_done(seq.index, seq.generated + tokens[:count]):
                kept = super().cut(seq, tokens[:count])
                seq.finish = seq.finish or "stop"
                return kept
        return super().cut(seq, tokens)

    def has_ended(self, row: int, tokens: list[int]) -> bool:
        """Whether a text of this row ends before or with the last of its new tokens."""
        if self.is_length_only or not tokens:
            return False
        length = self._prompts.shape[1] + len(tokens)
        if self.max_length is not None and length >= self.max_length:
            return True
        is_end = not self.eos_ids.isdisjoint(tokens)
        return is_end or bool(self.others) and self.is_done(row, tokens)

    def is_done(self, row: int, tokens: list[int]) -> bool:
        """Whether a criterion ends the text of a row with these new tokens."""
        key = row, tuple(tokens)
        if key not in self._done:
            self._done[key] = self._ask(row, tokens)
        return self._done[key]

    def _ask(self, row: int, tokens: list[int]) -> bool:
        prompts = self._prompts
        made = torch.tensor(tokens, dtype=prompts.dtype, device=prompts.device)
        ids = torch.cat([prompts[row], made]).expand(len(prompts), -1)
        scores = None if self.scores is None else self.scores(row, tokens)
        found = [torch.as_tensor(c(ids, scores)).flatten() for c in self.others]
        return any(bool(done[row] if len(done) > 1 else done.all()) for done in found)


def _check_rowwise(criteria: list[Any], batch: int) -> None:
    """Raises ConfigError for a criterion that may keep state, or compare rows."""
    for criterion in criteria:
        if not any(_is(criterion, name) for name in ROWWISE):
            name = getattr(criterion, "__name__", type(criterion).__name__)
            raise ConfigError(
                f"stopping criterion {name} cannot be used with batch size {batch}: it may keep "
                "state or compare rows, and rows of a batch advance by different numbers of "
                "tokens; use batch size 1 or plain generate, or pass rowwise=True if it keeps no "
                "state and treats each row by itself"
            )


def _is(criterion: Any, name: str) -> bool:
    """Whether a criterion has exactly this class of transformers; subclasses may differ."""
    kind = type(criterion)
    return kind.__module__ == MODULE and kind.__name__ == name


def _ids(criterion: Any) -> list[int]:
    try:
        return torch.as_tensor(criterion.eos_token_id).flatten().tolist()
    except (TypeError, ValueError) as cause:
        raise ConfigError(
            f"EosTokenCriteria has eos_token_id={criterion.eos_token_id!r}; expected token ids"
        ) from cause
