"""Next-token distributions of the target at the nodes of a tree, computed on first access."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forerun.core.records import Rows, Sequence
from forerun.core.roles import Shaper
from forerun.core.sampling import Sampling, log_softmax, to_probs
from forerun.core.tree import Tree

if TYPE_CHECKING:
    from forerun.verifiers._gpu_verdicts import TopLogits


class TargetProbs:
    """Processed next-token distribution [V] at each node of a tree; index -1 is the root.

    Shapers see the tokens on the path to the node. Each node is computed on first access.
    """

    def __init__(self, rows: Rows, seq: Sequence, tree: Tree, shapers: Many[Shaper]) -> None:
        self.sampling = seq.sampling
        self.rows, self._tree, self._shapers = rows, tree, shapers
        self._states: dict[int, tuple[Any, ...]] = {-1: seq.states}
        self._is_plain = seq.states.count(None) == len(seq.states)
        self._logits: dict[int, np.ndarray] = {}
        self._probs: dict[int, np.ndarray] = {}
        self._given: tuple[list[int], np.ndarray] | None = None  # nodes, probs [k, V]
        self.num_top_logits = 0  # top logits per row to copy to the host
        self.top_logits: TopLogits | None = None  # set once they are on the host

    def __getitem__(self, node: int) -> np.ndarray:
        if node not in self._probs:
            self._probs[node] = self._compute(node)
        return self._probs[node]

    def _compute(self, node: int) -> np.ndarray:
        if self._given is not None:
            nodes, probs = self._given
            if node in nodes:
                return probs[nodes.index(node)]
        return to_probs(self.logits(node), self.sampling)

    @property
    def is_temperature_only(self) -> bool:
        """Whether each distribution is argmax or softmax(logits / T), with nothing else applied."""
        is_simple = self.sampling.is_greedy or self.sampling.is_tempered
        return is_simple and self._is_plain and type(self.rows) is Rows

    def unshaped(self) -> np.ndarray | None:
        """Logits [n + 1, V] of root and nodes as contiguous float32 in host memory.

        None if they are stored otherwise, or if more than a temperature above 0 applies.
        """
        is_plain = self._is_plain and self.sampling.is_tempered
        return self.rows.contiguous if is_plain and type(self.rows) is Rows else None

    def set_probs(self, nodes: list[int], probs: np.ndarray) -> None:
        """Stores distributions [k, V] of some nodes, computed elsewhere from `unshaped`."""
        self._given = nodes, probs

    def at(self, nodes: list[int]) -> Many[np.ndarray] | np.ndarray:
        """The distributions at `nodes`: an array [n, V] if `set_probs` stored them, else a list."""
        if self._given is not None and self._given[0][: len(nodes)] == nodes:
            return self._given[1][: len(nodes)]
        return [self[node] for node in nodes]

    def with_rows(self, rows: Rows) -> TargetProbs:
        """The same shaping applied to other rows of this tree."""
        other = copy(self)
        other.rows, other._logits, other._probs = rows, {}, {}
        other._given = other.top_logits = None
        return other

    def logits(self, node: int) -> np.ndarray:
        """Shaped logits [V] before the temperature."""
        if node not in self._logits:
            logits = self.rows.row(node)
            if not self._is_plain:
                states = zip(self._shapers, self.states(node), strict=True)
                for shaper, state in states:
                    logits = logits if state is None else shaper.logits(state, logits)
            self._logits[node] = logits
        return self._logits[node]

    def logprobs(self, node: int) -> np.ndarray:
        """Log-probabilities [V] of the model: unshaped, temperature 1, float64."""
        return log_softmax(self.rows.row(node))

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
