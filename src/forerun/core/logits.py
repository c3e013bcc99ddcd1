"""Next-token distributions of the target at the nodes of a tree, computed on first access."""

from __future__ import annotations

from collections.abc import Sequence as Many
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.core.records import Rows, Sequence
from forerun.core.roles import Shaper
from forerun.core.sampling import log_softmax, to_probs
from forerun.core.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor


class TargetProbs:
    """Processed next-token distribution [V] at each node of a tree; index -1 is the root.

    Shapers see the tokens on the path to the node. Each node is computed on first access.
    """

    def __init__(self, rows: Rows, seq: Sequence, tree: Tree, shapers: Many[Shaper]) -> None:
        self.sampling, self._num_left = seq.sampling, seq.num_left
        self.rows, self._tree, self._shapers = rows, tree, shapers
        self._states: dict[int, tuple[Any, ...]] = {-1: seq.states}
        self._is_plain = seq.states.count(None) == len(seq.states)
        self._logits: dict[int, np.ndarray] = {}
        self._probs: dict[int, np.ndarray] = {}
        self._given: tuple[list[int], np.ndarray] | None = None  # nodes, probs [k, V]
        self.num_top_logits = 0  # top logits per row to copy to the host
        self.top_entries: TopEntries | None = None  # set once they are on the host

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
    def has_tensors(self) -> bool:
        """Whether all distributions can be computed on the device of the logits."""
        if type(self.rows) is not Rows:
            return False
        pairs = zip(self._shapers, self.states(-1), strict=not self._is_plain)
        return all(state is None or shaper.has_tensors for shaper, state in pairs)

    def tensor_logits(self, logits: Tensor) -> Tensor:
        """`logits` of all nodes [n + 1, V], root first, on the device of the model's logits."""
        if self._is_plain:
            return logits
        states = [self.states(node) for node in range(-1, len(self._tree))]
        for shaper, own in zip(self._shapers, zip(*states, strict=True), strict=True):
            if own[0] is not None:
                logits = shaper.tensor_logits(own, logits)
        return logits

    def unshaped(self) -> np.ndarray | None:
        """Logits [n + 1, V] of root and nodes as contiguous float32 in host memory.

        None if they are stored otherwise, or if more than a temperature above 0 applies.
        """
        is_plain = self._is_plain and self.sampling.is_softmax
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
        other._given = other.top_entries = None
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

    def unconstrained(self, node: int) -> np.ndarray:
        """Logits [V] before the temperature, shaped by all shapers that forbid nothing."""
        logits = self.rows.row(node)
        for shaper, state in zip(self._shapers, self.states(node), strict=True):
            if state is not None and not shaper.forbids:
                logits = shaper.logits(state, logits)
        return logits

    def logprobs(self, node: int) -> np.ndarray:
        """Log-probabilities [V] of the model: unshaped, temperature 1, float64."""
        return log_softmax(self.rows.row(node))

    @property
    def is_tested(self) -> bool:
        """Whether a constraint is tested when tokens are drawn: `allows` may be false for a token
        of positive probability."""
        pairs = zip(self._shapers, self.states(-1), strict=True)
        return any(state is not None and shaper.tests(state) for shaper, state in pairs)

    def allows(self, node: int, token: int) -> bool:
        """Whether all shapers allow `token` after the node's path."""
        pairs = zip(self._shapers, self.states(node), strict=True)
        return all(state is None or shaper.allows(state, token) for shaper, state in pairs)

    def mask(self, node: int) -> np.ndarray | None:
        """The tokens that tested constraints allow, bool [V]; None if that needs V tests."""
        pairs = zip(self._shapers, self.states(node), strict=True)
        found = [s.mask(state) for s, state in pairs if state is not None and s.tests(state)]
        masks = [one for one in found if one is not None]
        return np.logical_and.reduce(masks) if masks and len(masks) == len(found) else None

    def num_left(self, node: int) -> int:
        """Number of tokens that may still be generated after the node's path."""
        return self._num_left - (int(self._tree.depths[node]) if node >= 0 else 0)

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


@dataclass(frozen=True)
class TopEntries:
    """The K tokens with the largest shaped logits of each row of a tree, root first.

    ids [n + 1, K], descending by logit; probs [2, n + 1, K]: at temperature 1, and as sampled from
    (for greedy requests also at temperature 1).
    """

    ids: np.ndarray
    probs: np.ndarray

    def entries(self, nodes: list[int], num: int, *, is_raw: bool) -> tuple[np.ndarray, np.ndarray]:
        """The `num` largest entries, padded with zeros; node -1 is the root.

        Returns ids int32 and probabilities float32, both [len(nodes), num]. is_raw: probabilities
        at temperature 1 instead of those sampled from.
        """
        rows, most = np.array(nodes) + 1, min(num, self.ids.shape[1])
        ids, probs = np.zeros((len(rows), num), np.int32), np.zeros((len(rows), num), np.float32)
        ids[:, :most] = self.ids[rows, :most]
        probs[:, :most] = self.probs[0 if is_raw else 1, rows, :most]
        return ids, probs
