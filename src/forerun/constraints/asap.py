"""ASAp: samples that approach the model's law given that the text is allowed.

Park et al., "Grammar-Aligned Decoding", 2024. Masking gives a prefix u the mass P(u) although most
of its continuations may be forbidden. Let c(u) be the probability that the model completes u to an
allowed text. The wanted law is Q(x | u) ~ P(x | u) c(ux). c is unknown; ASAp keeps an upper bound
of it, which starts at 1 and falls as texts are sampled:

    bound(u) = sum over allowed x of P(x | u) bound(ux)

for every visited u, and 1 for all others. The first sample is that of masking. The law approaches Q
as samples accumulate, and equals it once all allowed texts were visited.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from forerun.constraints.base import Constraint
from forerun.core.records import Sequence, Snapshot
from forerun.core.sampling import Sampling, softmax
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

MAX_ROW_BYTES = 64 << 20  # of probabilities that the tries of one constraint keep
MAX_TRIES = 256  # prompts; beyond it the least recently used are dropped


@dataclass(eq=False, slots=True)
class Node:
    """A visited prefix.

    mass: probability of the allowed tokens. known: visited continuations by token. ids, probs: the
    allowed tokens [k] and their probabilities; None once they were dropped.
    """

    above: Node | None
    prob: float  # of its last token, given the prefix above
    mass: float
    bound: float
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


class Trie:
    """The visited prefixes of one prompt, with bounds. Paths are tuples of tokens.

    max_bytes: of the probabilities that are kept for `law`; the least recently used go first.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.root: Node | None = None
        self.num_nodes = 0
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._rows: OrderedDict[Node, None] = OrderedDict()  # nodes with probabilities

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
        self._keep(node, ids, probs)
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
    def of(cls, nodes: Many[tuple[int, int, float, float]], max_bytes: int | None = None) -> Trie:
        """A trie of (token, index of the node above, probability of the token, mass)."""
        trie, made = cls(max_bytes), list[Node]()
        for token, at, prob, mass in nodes:
            above = made[at] if at >= 0 else None
            node = Node(above, prob, mass, mass)
            if above is None:
                trie.root = node
            else:
                above.known[token] = node
            made.append(node)
        for node in reversed(made):
            node.bound -= sum(one.prob * (1 - one.bound) for one in node.known.values())
            node.bound = max(node.bound, 0.0)
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

    def _keep(self, node: Node, ids: np.ndarray, probs: np.ndarray) -> None:
        """Keeps the probabilities of a node, and drops those of others beyond the limit."""
        if node.ids is None:
            node.ids, node.probs = ids, probs
            self._num_bytes += ids.nbytes + probs.nbytes
        self._rows[node] = None
        self._rows.move_to_end(node)
        while self._max_bytes is not None and self._num_bytes > self._max_bytes:
            oldest, _ = self._rows.popitem(last=False)
            assert oldest.ids is not None and oldest.probs is not None
            self._num_bytes -= oldest.ids.nbytes + oldest.probs.nbytes
            oldest.ids = oldest.probs = None
            if oldest is node:
                break


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
    while node.above is not None and fall > 0:
        fall *= node.prob
        node = node.above
        node.bound = max(node.bound - fall, 0.0)


@dataclass(eq=False, slots=True)
class Place:
    """A text: the state of the inner constraint, and the place in the trie.

    node: None until the model's law at this place was seen.
    """

    inner: Any
    trie: Trie
    temperature: float
    above: Place | None = None
    token: int = -1
    node: Node | None = None


class Asap(Constraint):
    """ASAp for the constraint `inner`, with a trie for each prompt and setting of the sampling.

    The object keeps what it learned from call to call; `snapshot` and `restore` save and load it.
    P is the law that all other shapers and the temperature make of the model's. Drafts keep the law
    exactly, given what was sampled before.
    """

    def __init__(self, inner: Constraint) -> None:
        self.inner, self.eos_ids = inner, inner.eos_ids
        self.tries: OrderedDict[tuple[Any, ...], Trie] = OrderedDict()

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Self:
        bound = copy(self)  # with the same tries
        bound.inner = self.inner.bind(tokenizer, vocab_size)
        bound.eos_ids = bound.inner.eos_ids
        return bound

    def snapshot(self) -> Snapshot:
        """All tries, for a file."""
        nodes = [(i, *row) for i, trie in enumerate(self.tries.values()) for row in trie.nodes()]
        arrays: dict[str, np.ndarray] = {
            "trie": np.array([i for i, *_ in nodes], np.int32),
            "token": np.array([token for _, _, token, _ in nodes], np.int32),
            "above": np.array([above for *_, above in nodes], np.int64),
            "prob": np.array([node.prob for _, node, *_ in nodes]),
            "mass": np.array([node.mass for _, node, *_ in nodes]),
        }
        counts = {"tokens": len(nodes), "prompts": len(self.tries)}
        settings = {"constraint": self.inner.key(), "tries": [list(key) for key in self.tries]}
        return Snapshot("asap", arrays, settings, counts)

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces all tries. Raises ConfigError for those of another constraint."""
        snapshot.expect("asap")
        if snapshot.settings["constraint"] != self.inner.key():
            raise ConfigError("this memory of ASAp belongs to another constraint; use another file")
        held = snapshot.arrays
        rows = list(
            zip(*(held[n].tolist() for n in ("token", "above", "prob", "mass")), strict=True)
        )
        starts = np.searchsorted(held["trie"], np.arange(len(snapshot.settings["tries"]) + 1))
        self.tries.clear()
        for i, key in enumerate(snapshot.settings["tries"]):
            part = rows[starts[i] : starts[i + 1]]
            self.tries[tuple(map(_hashable, key))] = Trie.of(part, MAX_ROW_BYTES)

    def start(self, seq: Sequence) -> Place:
        place = Place(self.inner.start(_before(seq)), self._trie(seq), seq.sampling.temperature)
        for token in seq.generated:
            place = self.advance(place, token)
        return place

    def advance(self, state: Place, token: int) -> Place:
        inner = self.inner.advance(state.inner, token)
        return Place(inner, state.trie, state.temperature, state, token)

    def logits(self, state: Place, logits: np.ndarray) -> np.ndarray:
        ids = np.flatnonzero(self.inner.allowed(state.inner))
        shaped = np.full_like(logits, -np.inf)
        shaped[ids] = logits[ids]
        node = self._visit(state, ids, logits)
        if node is not None:
            with np.errstate(divide="ignore"):
                shaped[ids] += state.temperature * np.log(node.weights(ids))
        if shaped.max() == -np.inf:
            shaped[self.eos_ids[0]] = 0.0
        return shaped

    def _visit(self, place: Place, ids: np.ndarray, logits: np.ndarray) -> Node | None:
        """The node of a place; None if the one above is not known, or the constraint gave up."""
        above = None if place.above is None else _node_of(place.above)
        if (place.above is not None and above is None) or self.inner.error(place.inner):
            return None
        if place.token in self.eos_ids:
            return None  # an ended text is complete for ever
        probs = softmax(logits.astype(np.float64), place.temperature)[ids]
        place.node = place.trie.visit(above, place.token, ids, probs)
        return place.node

    def allowed(self, state: Place) -> np.ndarray:
        return self.inner.allowed(state.inner)

    def allows(self, state: Place, token: int) -> bool:
        node = _node_of(state)
        known = None if node is None else node.known.get(token)
        return (known is None or known.bound > 0) and self.inner.allows(state.inner, token)

    def forced(self, state: Place) -> Many[int]:
        return self.inner.forced(state.inner)

    def is_complete(self, state: Place) -> bool:
        return self.inner.is_complete(state.inner)

    def error(self, state: Place) -> str:
        return self.inner.error(state.inner)

    def begin(self, text: bytes) -> Any:
        raise NotImplementedError("a marker is inside of ASAp, not around it")

    def _trie(self, seq: Sequence) -> Trie:
        """The trie of a sequence's prompt, tenant and settings."""
        key = seq.cells_owner, tuple(seq.tokens[: seq.num_prompt]), *_processing(seq.sampling)
        if key not in self.tries:
            self.tries[key] = Trie(MAX_ROW_BYTES)
            if len(self.tries) > MAX_TRIES:
                self.tries.popitem(last=False)
        self.tries.move_to_end(key)
        return self.tries[key]


def _node_of(place: Place) -> Node | None:
    """The node of a place, if it was visited."""
    if place.node is None:
        if place.above is None:
            place.node = place.trie.root
        elif (above := _node_of(place.above)) is not None:
            place.node = above.known.get(place.token)
    return place.node


def _before(seq: Sequence) -> Sequence:
    """The sequence without its generated tokens."""
    prompt = seq.tokens[: seq.num_prompt]
    return Sequence(prompt, seq.num_prompt, seq.sampling, seq.dice, seq.limit)


def _processing(s: Sampling) -> tuple[Any, ...]:
    """The settings that change the model's law."""
    return (
        s.temperature,
        s.repetition_penalty,
        s.presence_penalty,
        s.frequency_penalty,
        tuple(sorted(s.logit_bias.items())),
        s.banned_tokens,
        s.min_new_tokens,
    )


def _hashable(value: Any) -> Any:
    """A value of a key as it was before JSON: lists become tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
