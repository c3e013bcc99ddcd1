"""Logit bias, banned tokens, minimum length and penalties: the first shaper of every request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forerun.core.records import Sequence
from forerun.core.roles import Shaper
from forerun.core.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

FOLD_TOKENS = 32  # generated tokens after which a new summary is made


@dataclass(frozen=True)
class HistorySummary:
    """Token counts of a text up to some position, shared by all later states."""

    prompt: frozenset[int]
    counts: Mapping[int, int]  # of generated tokens
    num: int  # generated tokens

    @cached_property
    def seen(self) -> np.ndarray:
        """Distinct ids [k] of prompt and generated tokens."""
        return np.fromiter(self.prompt | self.counts.keys(), dtype=np.int64)

    @cached_property
    def times(self) -> np.ndarray:
        """How often each of `seen` was generated, int64 [k]."""
        return np.array([self.counts.get(token, 0) for token in self.seen.tolist()], np.int64)

    @cached_property
    def places(self) -> dict[int, int]:
        """The index in `seen` of each token."""
        return {token: i for i, token in enumerate(self.seen.tolist())}

    @cached_property
    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids [m] of generated tokens and their counts [m]."""
        ids = np.fromiter(self.counts, dtype=np.int64, count=len(self.counts))
        return ids, np.fromiter(self.counts.values(), dtype=np.int64, count=len(ids))


class History(NamedTuple):
    """State of `Adjust`: a shared summary and the tokens since, fewer than FOLD_TOKENS.

    Immutable. The next state is made in a time independent of the text length.
    """

    sampling: Sampling
    past: HistorySummary
    path: tuple[int, ...] = ()

    @property
    def generated(self) -> Counter[int]:
        """How often each token was generated."""
        return Counter(self.past.counts) + Counter(self.path)

    @property
    def num_generated(self) -> int:
        return self.past.num + len(self.path)

    def then(self, token: int) -> History:
        """The state after one more token."""
        path = (*self.path, token)
        if len(path) < FOLD_TOKENS:
            return self._replace(path=path)
        past = HistorySummary(
            self.past.prompt, self.generated + Counter([token]), self.num_generated + 1
        )
        return History(self.sampling, past)


class Adjust(Shaper):
    """Applies logit bias, banned tokens, minimum length and penalties."""

    has_tensors = True

    def __init__(self, eos_ids: Many[int] = ()) -> None:
        self.eos_ids = tuple(eos_ids)

    def start(self, seq: Sequence) -> History | None:
        if not seq.sampling.adjusts:
            return None
        prompt, generated = frozenset(seq.tokens[: seq.num_prompt]), seq.generated
        return History(seq.sampling, HistorySummary(prompt, Counter(generated), len(generated)))

    def advance(self, state: History, token: int) -> History:
        return state.then(token)

    def logits(self, state: History, logits: np.ndarray) -> np.ndarray:
        s, logits = state.sampling, logits.copy()
        for token, bias in s.logit_bias.items():
            logits[token] += bias
        if s.repetition_penalty != 1.0:
            _repetition(logits, state)
        if s.presence_penalty or s.frequency_penalty:
            _counted(logits, state)
        logits[list(self._banned(state))] = -np.inf
        return logits

    def tensor_logits(self, states: Many[History], logits: Tensor) -> Tensor:
        from forerun.constraints._penalty_tensors import adjusted

        return adjusted(logits, states, [self._banned(state) for state in states])

    def allows(self, state: History, token: int) -> bool:
        return token not in self._banned(state)

    def _banned(self, state: History) -> tuple[int, ...]:
        """Banned tokens, and end tokens while the text is shorter than min_new_tokens."""
        s = state.sampling
        if state.num_generated >= s.min_new_tokens:
            return s.banned_tokens
        return s.banned_tokens + s.stop_token_ids + (() if s.ignore_eos else self.eos_ids)


def _repetition(logits: np.ndarray, state: History) -> None:
    """Repetition penalty, in place: divides positive logits of seen tokens, multiplies negative."""
    past, r = state.past, state.sampling.repetition_penalty
    new = [t for t in set(state.path) if t not in past.counts and t not in past.prompt]
    seen = np.concatenate([past.seen, np.array(new, dtype=np.int64)]) if new else past.seen
    scores = logits[seen]
    logits[seen] = np.where(scores > 0, scores / r, scores * r)


def _counted(logits: np.ndarray, state: History) -> None:
    """Subtracts presence and frequency penalties from logits [V] of generated tokens, in place."""
    s, (ids, counts) = state.sampling, state.past.table
    new = Counter(state.path)
    late = np.fromiter(new, dtype=np.int64, count=len(new))
    totals = np.array([state.past.counts.get(t, 0) + n for t, n in new.items()], dtype=np.int64)
    before = logits[late]
    for at, scores, num in ((ids, logits[ids], counts), (late, before, totals)):
        penalties = s.presence_penalty + s.frequency_penalty * num
        logits[at] = scores - penalties.astype(logits.dtype)
