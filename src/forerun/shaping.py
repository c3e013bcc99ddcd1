"""The processed law at every node of a tree, computed when somebody first looks at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np

from forerun.records import Rows, Sequence
from forerun.roles import Shaper
from forerun.sampling import Sampling, log_softmax, softmax, to_probs
from forerun.tree import Tree


class Laws:
    """laws[node] is the law [V] that the user is promised after the node's path; -1 is the root.

    Each node is shaped with the history of its own path, and only nodes that are looked at cost
    anything.
    """

    def __init__(self, rows: Rows, seq: Sequence, tree: Tree, shapers: Many[Shaper]) -> None:
        self.sampling = seq.sampling
        self._rows, self._tree, self._shapers = rows, tree, shapers
        self._states: dict[int, tuple[Any, ...]] = {-1: seq.states}
        self._is_plain = all(state is None for state in seq.states)
        self._logits: dict[int, np.ndarray] = {}
        self._probs: dict[int, np.ndarray] = {}

    def __getitem__(self, node: int) -> np.ndarray:
        if node not in self._probs:
            self._probs[node] = to_probs(self.logits(node), self.sampling)
        return self._probs[node]

    def logits(self, node: int) -> np.ndarray:
        """Shaped logits [V] before the temperature."""
        if node not in self._logits:
            logits = self._rows.row(node)
            if not self._is_plain:
                states = zip(self._shapers, self.states(node), strict=True)
                for shaper, state in states:
                    logits = logits if state is None else shaper.logits(state, logits)
            self._logits[node] = logits
        return self._logits[node]

    def model_probs(self, node: int) -> np.ndarray:
        """The law [V] at temperature 1 without truncation."""
        return softmax(self.logits(node))

    def logprobs(self, node: int) -> np.ndarray:
        """The model's own log-probabilities [V]: unshaped, temperature 1, float64."""
        return log_softmax(self._rows.row(node))

    def states(self, node: int) -> tuple[Any, ...]:
        """Shaper states after the node's path."""
        if node not in self._states:
            above = self.states(int(self._tree.parents[node]))
            self._states[node] = advance(self._shapers, above, int(self._tree.tokens[node]))
        return self._states[node]


def advance(shapers: Many[Shaper], states: tuple[Any, ...], token: int) -> tuple[Any, ...]:
    """All shaper states after one more token."""
    return tuple(
        None if state is None else shaper.advance(state, token)
        for shaper, state in zip(shapers, states, strict=True)
    )


class History(NamedTuple):
    """State of `Adjust`: what it must know of the text so far."""

    sampling: Sampling
    prompt: frozenset[int]
    generated: Counter[int]


class Adjust(Shaper):
    """Bias, bans, minimum length and penalties: the sampling parameters that act on logits."""

    def __init__(self, eos_ids: Many[int] = ()) -> None:
        self.eos_ids = tuple(eos_ids)

    def start(self, seq: Sequence) -> History | None:
        if not seq.sampling.adjusts:
            return None
        prompt = frozenset(seq.tokens[: seq.num_prompt])
        return History(seq.sampling, prompt, Counter(seq.generated))

    def advance(self, state: History, token: int) -> History:
        generated = state.generated.copy()
        generated[token] += 1
        return state._replace(generated=generated)

    def logits(self, state: History, logits: np.ndarray) -> np.ndarray:
        s, logits = state.sampling, logits.copy()
        for token, bias in s.logit_bias.items():
            logits[token] += bias
        if s.repetition_penalty != 1.0:
            seen = np.fromiter(state.prompt | state.generated.keys(), dtype=np.int64)
            scores = logits[seen]
            r = s.repetition_penalty
            logits[seen] = np.where(scores > 0, scores / r, scores * r)
        for token, count in state.generated.items():
            logits[token] -= s.presence_penalty + s.frequency_penalty * count
        logits[list(self._banned(state))] = -np.inf
        return logits

    def allows(self, state: History, token: int) -> bool:
        return token not in self._banned(state)

    def _banned(self, state: History) -> tuple[int, ...]:
        """Tokens of probability 0: those banned, and the ends while the text is too short."""
        s = state.sampling
        if state.generated.total() >= s.min_new_tokens:
            return s.banned_tokens
        return s.banned_tokens + s.stop_token_ids + (() if s.ignore_eos else self.eos_ids)
