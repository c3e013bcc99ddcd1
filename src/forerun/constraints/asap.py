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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from forerun.constraints._asap_trie import Node, Rows, Trie
from forerun.constraints.base import Constraint
from forerun.core.records import Sequence, Snapshot
from forerun.core.sampling import Sampling, softmax

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

MAX_BYTES = 512 << 20  # of the tries of one memory
MAX_TRIES = 256  # prompts; beyond it the least recently used are dropped
COLUMNS = ("token", "above", "prob", "bound", "exact")  # of a node, in a file
NODE_BYTES, KEY_TOKEN_BYTES = 800, 40  # of a visited prefix, and of a token of a prompt


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


class AsapMemory:
    """Tries by constraint, tenant, prompt and settings; the least recently used are dropped.

    max_bytes: half of it for probabilities, half for prefixes; checked when a sequence starts.
    is_shared: whether tries compete for the space of probabilities; else each has as much.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, *, is_shared: bool = True) -> None:
        self.tries: OrderedDict[tuple[Any, ...], Trie] = OrderedDict()
        self.max_bytes, self._is_shared = max_bytes, is_shared
        self._rows = Rows(max_bytes // 2)
        self._prefix_bytes = 0  # when a sequence started last

    @property
    def num_bytes(self) -> int:
        """Bytes of the tries, as far as they were measured."""
        return self._rows.num_bytes + self._prefix_bytes

    def trie(self, constraint: Constraint, law: str, seq: Sequence) -> Trie:
        """The trie of a sequence, made if it is new. law: of other shapers; see `Asap`."""
        prompt = tuple(seq.tokens[: seq.num_prompt])
        name = f"{constraint.key()} {law}" if law else constraint.key()
        key = name, seq.cells_owner, prompt, *_processing(seq.sampling)
        trie = self.tries.pop(key, None)
        if trie is not None and _prefix_bytes(key, trie) > self.max_bytes // 2:
            trie.clear()
            trie = None
        found = self.tries[key] = self._made() if trie is None else trie
        self._prefix_bytes = sum(_prefix_bytes(*item) for item in self.tries.items())
        while len(self.tries) > 1 and self._is_full():
            oldest = next(iter(self.tries))
            self._prefix_bytes -= _prefix_bytes(oldest, self.tries[oldest])
            self.tries.pop(oldest).clear()
        return found

    def clear(self) -> None:
        """Forgets everything."""
        self.tries.clear()
        self._rows, self._prefix_bytes = Rows(self.max_bytes // 2), 0

    def _is_full(self) -> bool:
        return len(self.tries) > MAX_TRIES or self._prefix_bytes > self.max_bytes // 2

    def _made(self) -> Trie:
        return Trie(rows=self._rows if self._is_shared else Rows(self.max_bytes // 2))

    def snapshot(self, tenant: str = "") -> Snapshot:
        """The tries of a tenant, for a file."""
        mine = [(key, trie) for key, trie in self.tries.items() if key[1] == tenant]
        nodes = [(i, *row) for i, (_, trie) in enumerate(mine) for row in trie.nodes()]
        arrays: dict[str, np.ndarray] = {
            "trie": np.array([i for i, *_ in nodes], np.int32),
            "token": np.array([token for _, _, token, _ in nodes], np.int32),
            "above": np.array([above for *_, above in nodes], np.int64),
            "prob": np.array([node.prob for _, node, *_ in nodes]),
            "bound": np.array([node.bound for _, node, *_ in nodes]),
            "exact": np.array([node.exact for _, node, *_ in nodes]),
        }
        counts = {"tokens": len(nodes), "prompts": len(mine)}
        return Snapshot("asap", arrays, {"tries": [list(key) for key, _ in mine]}, counts)

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        """Replaces the tries of a tenant."""
        snapshot.expect("asap")
        held = snapshot.arrays
        columns = (held[name].tolist() for name in COLUMNS)
        rows = list(zip(*columns, strict=True))
        keys = [tuple(map(_hashable, key)) for key in snapshot.settings["tries"]]
        starts = np.searchsorted(held["trie"], np.arange(len(keys) + 1))
        for key in [key for key in self.tries if key[1] == tenant]:
            self.tries.pop(key).clear()
        for i, (constraint, _, *others) in enumerate(keys):
            part = rows[starts[i] : starts[i + 1]]
            self.tries[constraint, tenant, *others] = Trie.of(part, self._rows)


class Asap(Constraint):
    """ASAp for the constraint `inner`, with a trie for each prompt and setting of the sampling.

    P is the law that all other shapers and the temperature make of the model's. Drafts keep the law
    exactly, given what was sampled before. memory: where the tries are kept from call to call.
    law: a text that tells the other shapers from those of other calls, as they change P.
    """

    def __init__(self, inner: Constraint, memory: AsapMemory | None = None, law: str = "") -> None:
        self.inner, self.eos_ids = inner, inner.eos_ids
        self.has_cheap_mask = inner.has_cheap_mask
        self.memory, self.law = AsapMemory() if memory is None else memory, law

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Self:
        bound = copy(self)  # with the same memory
        bound.inner = self.inner.bind(tokenizer, vocab_size)
        bound.eos_ids = bound.inner.eos_ids
        return bound

    def start(self, seq: Sequence) -> Place:
        trie = self.memory.trie(self.inner, self.law, seq)
        place = Place(self.inner.start(_before(seq)), trie, seq.sampling.temperature)
        for token in seq.generated:
            place = self.advance(place, token)
        return place

    def advance(self, state: Place, token: int) -> Place:
        inner = self.inner.advance(state.inner, token)
        return Place(inner, state.trie, state.temperature, state, token)

    def logits(self, state: Place, logits: np.ndarray) -> np.ndarray:
        ids = np.flatnonzero(self.allowed(state))
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
        """The node of a place; None if the one above is not known, or after an end token.

        A place where the constraint gave up is not visited: what it forbids there is unknown.
        """
        above = None if place.above is None else _node_of(place.above)
        if place.above is not None and above is None:
            return None
        if place.token in self.eos_ids or self.inner.error(place.inner):
            return _node_of(place)
        probs = softmax(logits.astype(np.float64), place.temperature)[ids]
        place.node = place.trie.visit(above, place.token, ids, probs)
        return place.node

    def allowed(self, state: Place) -> np.ndarray:
        """Without end tokens where the text would not be valid, as before a marker."""
        found = self.inner.allowed(state.inner)
        if not self.inner.is_complete(state.inner):
            found[list(self.eos_ids)] = False
        return found

    def allows(self, state: Place, token: int) -> bool:
        if token in self.eos_ids and not self.inner.is_complete(state.inner):
            return False
        node = _node_of(state)
        known = None if node is None else node.known.get(token)
        return (known is None or known.bound > 0) and self.inner.allows(state.inner, token)

    def forced(self, state: Place) -> Many[int]:
        return self.inner.forced(state.inner)

    def is_complete(self, state: Place) -> bool:
        return self.inner.is_complete(state.inner)

    def error(self, state: Place) -> str:
        return self.inner.error(state.inner)

    def missing(self, state: Place) -> str:
        return self.inner.missing(state.inner)

    def begin(self, text: bytes) -> Any:
        raise NotImplementedError("a marker is inside of ASAp, not around it")


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
        *((s.stop_token_ids, s.ignore_eos) if s.min_new_tokens else ()),  # banned until then
    )


def _prefix_bytes(key: tuple[Any, ...], trie: Trie) -> int:
    """Bytes of a trie without probabilities."""
    return NODE_BYTES * trie.num_nodes + KEY_TOKEN_BYTES * len(key[2])


def _hashable(value: Any) -> Any:
    """A value of a key as it was before JSON: lists become tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
