"""The trie of ASAp (`constraints/asap.py`): visited prefixes and their bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.errors import ConfigError

MIN_SHARE = 1e-3  # of a sum that subtractions may leave; below it rounding would show


@dataclass(eq=False, slots=True)
class Node:
    """A visited prefix.

    known: visited continuations by token. ids, probs: the allowed tokens [k] and their
    probabilities; None once they were dropped.
    """

    above: Node | None
    prob: float  # of its last token, given the prefix above
    bound: float
    exact: float  # the bound when it was last summed; since then falls were subtracted from it
    known: dict[int, Node] = field(default_factory=dict)
    ids: np.ndarray | None = None
    probs: np.ndarray | None = None

    def weights(self, ids: np.ndarray) -> np.ndarray:
        """The bounds of the continuations by sorted tokens `ids`, float64 [k]."""
        found = np.ones(len(ids))
        if self.known:
            tokens = np.fromiter(self.known, np.int64, len(self.known))
            at = np.searchsorted(ids, tokens)
            is_in = (at < len(ids)) & (ids[np.minimum(at, len(ids) - 1)] == tokens)
            bounds = np.array([node.bound for node in self.known.values()])
            found[at[is_in]] = bounds[is_in]
        return found

    def sum_again(self) -> None:
        """Sums the bound from its parts if most of it was subtracted since the last time.

        Without its probabilities it stays at MIN_SHARE: below, rounding could end at 0.
        """
        least = MIN_SHARE * self.exact
        if self.bound > least:
            return
        if self.ids is None or self.probs is None:
            self.bound = least
        else:
            self.bound = self.exact = float(self.probs @ self.weights(self.ids))


class Rows:
    """The probabilities that nodes keep. max_bytes: the least recently used are dropped beyond."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def keep(self, node: Node, ids: np.ndarray, probs: np.ndarray) -> None:
        """Keeps the probabilities of a node, if they fit."""
        if node.ids is None:
            node.ids, node.probs = ids, probs
            self.num_bytes += ids.nbytes + probs.nbytes
        self._nodes[node] = None
        self._nodes.move_to_end(node)
        while self.max_bytes is not None and self.num_bytes > self.max_bytes:
            oldest = next(iter(self._nodes))
            self.drop(oldest)
            if oldest is node:
                break

    def drop(self, node: Node) -> None:
        """Drops the probabilities of a node, if it has any."""
        if node in self._nodes:
            del self._nodes[node]
            assert node.ids is not None and node.probs is not None
            self.num_bytes -= node.ids.nbytes + node.probs.nbytes
            node.ids = node.probs = None


class Trie:
    """The visited prefixes of one prompt, with bounds. Paths are tuples of tokens.

    max_bytes: of the probabilities that are kept for `law`; the least recently used go first.
    rows: where they are kept instead, together with those of other tries.
    """

    def __init__(self, max_bytes: int | None = None, rows: Rows | None = None) -> None:
        self.root: Node | None = None
        self.num_nodes = 0
        self._rows = Rows(max_bytes) if rows is None else rows

    def clear(self) -> None:
        """Drops all probabilities; the bounds stay."""
        for node, _, _ in self.nodes():
            self._rows.drop(node)

    def expand(self, path: Many[int], ids: Any, probs: Any) -> Node:
        """Visits a prefix: its allowed tokens [k], and their probabilities under the model.

        probs are not renormalised over the allowed tokens. Raises ConfigError if the prefix above
        was not visited, or does not allow the last token.
        """
        order = np.argsort(ids)
        ids = np.asarray(ids, dtype=np.int64)[order]
        probs = np.asarray(probs, dtype=np.float64)[order]
        if not path:
            return self.visit(None, -1, ids, probs)
        above = self.find(path[:-1])
        if above is None:
            raise ConfigError(f"the prefix above {tuple(path)} was not visited; expand it first")
        return self.visit(above, int(path[-1]), ids, probs)

    def visit(self, above: Node | None, token: int, ids: np.ndarray, probs: np.ndarray) -> Node:
        """The node of `token` below `above`, made if it is new; ids sorted.

        A new node lowers the bounds of all nodes above it.
        """
        node = self.root if above is None else above.known.get(token)
        if node is None:
            mass = min(float(probs.sum()), 1.0)
            node = Node(above, _prob_of(above, token), mass, mass)
            if above is None:
                self.root = node
            else:
                above.known[token] = node
            self.num_nodes += 1
            _lower(node, 1.0)
        self._rows.keep(node, ids, probs)
        before = node.bound
        node.sum_again()
        _lower(node, before)
        return node

    def find(self, path: Many[int]) -> Node | None:
        """The node of a prefix; None if it was not visited."""
        node = self.root
        for token in path:
            if node is None:
                return None
            node = node.known.get(int(token))
        return node

    def nodes(self) -> list[tuple[Node, int, int]]:
        """All nodes with their last token and the index of the node above (-1: none), parents
        first."""
        found: list[tuple[Node, int, int]] = [] if self.root is None else [(self.root, -1, -1)]
        for at, (node, _, _) in enumerate(found):  # grows as it is read
            found += [(below, token, at) for token, below in node.known.items()]
        return found

    @classmethod
    def of(
        cls, nodes: Many[tuple[int, int, float, float, float]], rows: Rows | None = None
    ) -> Trie:
        """A trie of (token, index of the node above, prob, bound, exact), parents first."""
        trie, made = cls(rows=rows), list[Node]()
        for token, at, prob, bound, exact in nodes:
            above = made[at] if at >= 0 else None
            node = Node(above, prob, bound, exact)
            if above is None:
                trie.root = node
            else:
                above.known[token] = node
            made.append(node)
        trie.num_nodes = len(made)
        return trie

    def bound(self, path: Many[int]) -> float:
        """The upper bound of the probability that a prefix is completed to an allowed text."""
        node = self.find(path)
        return 1.0 if node is None else node.bound

    def law(self, path: Many[int]) -> tuple[np.ndarray, np.ndarray]:
        """The allowed tokens after a visited prefix, and their probabilities under ASAp.

        Raises ConfigError if it was not visited or its probabilities were dropped; all
        probabilities are 0 if no allowed text begins with it.
        """
        node = self.find(path)
        if node is None or node.ids is None or node.probs is None:
            raise ConfigError(f"the probabilities after {tuple(path)} are not known; expand it")
        weights = node.probs * node.weights(node.ids)
        total = weights.sum()
        return node.ids, weights / total if total > 0 else weights


def _prob_of(above: Node | None, token: int) -> float:
    """The probability of a token after a node. Raises ConfigError if it is not allowed there."""
    if above is None:
        return 1.0
    if above.ids is None or above.probs is None:
        return 0.0  # dropped: the node then changes no bound, which stays an upper one
    at = int(np.searchsorted(above.ids, token))
    if at == len(above.ids) or above.ids[at] != token:
        raise ConfigError(f"token {token} is not allowed after the prefix above it")
    return float(above.probs[at])


def _lower(node: Node, before: float) -> None:
    """Propagates a bound that has fallen from `before` to the nodes above."""
    fall = before - node.bound
    while node.above is not None and fall != 0.0:
        fall *= node.prob
        node = node.above
        before = node.bound
        node.bound = max(before - fall, 0.0)
        node.sum_again()
        fall = before - node.bound
