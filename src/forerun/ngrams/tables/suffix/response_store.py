"""Text stores for drafters that copy: one per sequence, and shared ones per scope.

A sequence writes its prompt and output to its own store, and its output to the shared store of its
scope, where other sequences can match it. All shared stores have one budget: unused stores are
evicted first, least recently used first; then a store drops its oldest texts. Saved files contain
only the texts, because any store can be rebuilt from them.

Texts are added lazily: `join` adds nothing, `follow` adds a sequence's new tokens, `gather` adds
those of the other sequences. Finished responses are queued, within a share of the budget.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from forerun.core.records import Sequence, Snapshot
from forerun.core.roles import Target
from forerun.core.scopes import check_scope
from forerun.errors import ConfigError, DataError

CONTEXT_TOKENS = 8  # prompt tokens stored before a response
CHECK_TOKENS = 16  # compared to detect that a text was changed, not extended
READ_TOKENS = 512  # approximate number of queued tokens read per call of `gather`
QUEUE_DIVISOR = 16  # the queue may use 1 / 16 of the budget; the oldest responses are dropped


class Store(Protocol):
    """A store of texts that can be matched: a suffix tree or an automaton."""

    budget: int

    @property
    def nbytes(self) -> int: ...
    def growth(self, num: int) -> int: ...
    def begin(self, context: Many[int] = ()) -> Any: ...
    def extend(self, text: Any, tokens: Many[int]) -> Any: ...
    def end(self, text: Any) -> None: ...
    def all_texts(self) -> list[np.ndarray]: ...


Own = TypeVar("Own", bound=Store)
Common = TypeVar("Common", bound=Store)


@dataclass(eq=False)
class Reader(Generic[Own, Common]):
    """A sequence's texts: `text` in its own store, `entry` in the shared store, if any."""

    make: Callable[[], Own]
    key: Hashable
    shared: Common | None
    entry: Any
    length: int = 0  # tokens in the shared store
    tail: list[int] = field(default_factory=list)  # the last of them
    num_own: int = 0  # tokens in its own store

    @cached_property
    def own(self) -> Own:
        return self.make()

    @cached_property
    def text(self) -> Any:
        return self.own.begin()

    def fits(self, tokens: list[int]) -> bool:
        """Whether `tokens` extends the stored tokens."""
        return tokens[self.length - len(self.tail) : self.length] == self.tail


class Responses(Generic[Own, Common]):
    """Stores of running sequences, and shared stores by scope. name: of the drafter."""

    def __init__(
        self,
        name: str,
        own: Callable[[], Own],
        shared: Callable[[int], Common],
        *,
        scope: str,
        budget: int,
    ) -> None:
        check_scope(scope)
        self.name, self.scope, self.budget = name, scope, budget
        self._own, self._new = own, shared
        self._readers: weakref.WeakKeyDictionary[Sequence, Reader[Own, Common]]
        self._readers = weakref.WeakKeyDictionary()
        self._stores: OrderedDict[Hashable, Common] = OrderedDict()  # least recently used first
        self._users: dict[Hashable, weakref.WeakSet[Sequence]] = {}
        # sequences for `gather`, in order
        self._joined: dict[Hashable, weakref.WeakKeyDictionary[Sequence, None]] = {}
        self._unread: OrderedDict[Hashable, deque[np.ndarray]] = OrderedDict()  # finished responses
        self._unread_bytes = 0
        self._target: weakref.ref[Target] | None = None
        self._largest = -1  # largest restored token
        shared(budget)  # raises ConfigError for bad options

    def bind(self, target: Target) -> None:
        """Sets the target; drops texts of another target.

        Raises ConfigError if restored texts exceed its vocabulary.
        """
        if self._target is not None and self._target() is not target:
            self._stores.clear()
            self._readers.clear()
            self._unread.clear()
            self._unread_bytes = 0
            self._largest = -1
        self._target = weakref.ref(target)
        self._check(self._largest)

    def join(self, seq: Sequence) -> None:
        """Registers a sequence for `gather`."""
        if (key := self._key(seq)) is not None:
            self._joined.setdefault(key, weakref.WeakKeyDictionary())[seq] = None

    def follow(self, seq: Sequence) -> Reader[Own, Common]:
        """The sequence's reader, after adding its new tokens to both stores."""
        reader = self._share(seq)
        if reader.num_own < len(seq.tokens):
            reader.own.extend(reader.text, seq.tokens[reader.num_own :])
            reader.num_own = len(seq.tokens)
        return reader

    def gather(self, seqs: Many[Sequence]) -> None:
        """Adds new tokens of all joined sequences, and some queued responses, to shared stores."""
        for key in dict.fromkeys(map(self._key, seqs)):
            for ref in self._joined[key].keyrefs() if key in self._joined else ():
                if (other := ref()) is not None:
                    self._share(other)
            if key in self._unread:
                self._read(key, READ_TOKENS)

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence; its response stays in the shared store or in the queue."""
        key = self._key(seq)
        joined = self._joined.get(key, weakref.WeakKeyDictionary())
        if seq in self._readers:
            reader = self._share(seq)  # it may have tokens since its last draft
            if reader.shared is not None:
                reader.shared.end(reader.entry)
            del self._readers[seq]
        elif seq in joined:
            self._enqueue(key, seq)
        joined.pop(seq, None)
        if not joined:
            self._joined.pop(key, None)
        users = self._users.get(key, weakref.WeakSet())
        users.discard(seq)
        if not len(users):
            self._users.pop(key, None)

    def forget(self, group: Hashable) -> None:
        """Removes the store and the queue of a group."""
        self._stores.pop(group, None)
        self._unread_bytes -= sum(text.nbytes for text in self._unread.pop(group, ()))

    def report(self) -> dict[str, int]:
        """Bytes by part."""
        own = sum(reader.own.nbytes for reader in self._readers.values() if reader.num_own)
        shared = sum(store.nbytes for store in self._stores.values())
        return {"own texts": own, "shared texts": shared, "unread texts": self._unread_bytes}

    def check_can_keep(self, tenant: str) -> None:
        """Raises ConfigError unless the scope keeps responses per tenant, beyond a request."""
        if self.scope in ("request", "group") or (self.scope == "global" and tenant):
            raise ConfigError(
                f"scope={self.scope!r} does not keep responses per tenant after a request; use "
                f"{self.name}:scope=tenant"
            )

    def snapshot(self, tenant: str) -> Snapshot:
        """The texts of a tenant. Raises ConfigError if there are none."""
        self.check_can_keep(tenant)
        key = self._kept_key(tenant)
        self._read(key)
        store = self._stores.get(key)
        return pack(self.name, [] if store is None else store.all_texts())

    def restore(self, snapshot: Snapshot, tenant: str) -> None:
        """Replaces a tenant's texts by those of a snapshot.

        Running sequences are added again at their next draft or at their end.
        """
        self.check_can_keep(tenant)
        snapshot.expect(self.name)
        key, texts = self._kept_key(tenant), unpack(snapshot)
        largest = int(snapshot.arrays["tokens"].max(initial=-1))
        self._check(largest)
        self._largest = max(self._largest, largest)
        for seq in self._users.get(key, ()):
            self._readers.pop(seq, None)
            self.join(seq)
        self.forget(key)
        for text in texts:
            self._add(key, text)

    def _check(self, largest: int) -> None:
        """Raises ConfigError if the target does not have the token."""
        target = None if self._target is None else self._target()
        if target is not None and largest >= target.vocab_size:
            raise ConfigError(
                f"the restored texts have token id {largest}, the model's largest id is "
                f"{target.vocab_size - 1}; use a memory of the same tokenizer"
            )

    def _open(self, seq: Sequence) -> Reader[Own, Common]:
        """A reader that has read the prompt, except for the tokens stored before the response."""
        before = seq.tokens[: _lead(seq)]
        key = self._key(seq)
        shared = None if key is None else self._store(key)
        entry = None if shared is None else shared.begin(before)
        if key is not None:
            self._users.setdefault(key, weakref.WeakSet()).add(seq)
        return Reader(self._own, key, shared, entry, len(before), before[-CHECK_TOKENS:])

    def _share(self, seq: Sequence) -> Reader[Own, Common]:
        """The sequence's reader, after adding its new tokens to the shared store."""
        reader = self._readers.get(seq)
        if reader is None or not reader.fits(seq.tokens):
            reader = self._readers[seq] = self._open(seq)
        new = seq.tokens[reader.length :]
        if new:
            if reader.shared is not None:
                if growth := reader.shared.growth(len(new)):
                    self._make_room(reader.key, growth)
                reader.shared.extend(reader.entry, new)
            reader.length, reader.tail = len(seq.tokens), seq.tokens[-CHECK_TOKENS:]
        return reader

    def _enqueue(self, key: Hashable, seq: Sequence) -> None:
        """Queues a finished response; drops the oldest ones beyond the queue's budget."""
        text = np.array(seq.tokens[_lead(seq) :], np.int32)
        self._unread.setdefault(key, deque()).append(text)
        self._unread.move_to_end(key)
        self._unread_bytes += text.nbytes
        while self._unread_bytes > self.budget // QUEUE_DIVISOR:
            oldest = next(iter(self._unread))
            self._unread_bytes -= self._unread[oldest].popleft().nbytes
            if not self._unread[oldest]:
                del self._unread[oldest]

    def _read(self, key: Hashable, most: int | None = None) -> None:
        """Adds queued responses, oldest first, until they have at least `most` tokens."""
        waiting, done = self._unread.get(key), 0
        while waiting and (most is None or done < most):
            text = waiting.popleft()
            self._unread_bytes -= text.nbytes
            self._add(key, text)
            done += len(text)
        if waiting is not None and not waiting:
            del self._unread[key]

    def _add(self, key: Hashable, text: np.ndarray) -> None:
        """Adds a complete response to a shared store."""
        store = self._store(key)
        self._make_room(key, store.growth(len(text)))
        entry = store.begin()
        store.extend(entry, text.tolist())
        store.end(entry)

    def _store(self, key: Hashable) -> Common:
        if key not in self._stores:
            self._stores[key] = self._new(self.budget)
            self._make_room(key, 0)
        self._stores.move_to_end(key)
        return self._stores[key]

    def _make_room(self, key: Hashable, growth: int) -> None:
        """Evicts unused stores, least recently used first, to free `growth` bytes for one store.

        Then sets the budget of every store.
        """
        total = self._unread_bytes + sum(store.nbytes for store in self._stores.values())
        for other in list(self._stores):
            if total + growth <= self.budget:
                break
            if other != key and not len(self._users.get(other, ())):
                total -= self._stores.pop(other).nbytes
        for store in self._stores.values():
            store.budget = self.budget - total + store.nbytes

    def _key(self, seq: Sequence) -> Hashable:
        """The key of the sequence's shared store: global, tenant or group; None: not shared."""
        if self.scope in ("tenant", "global"):
            return self._kept_key(seq.tenant)
        return seq.group if self.scope == "group" else None

    def _kept_key(self, tenant: str) -> Hashable:
        return ("tenant", tenant) if self.scope == "tenant" else "global"


def _lead(seq: Sequence) -> int:
    """The start of the stored response: its begin minus the context tokens."""
    return max(0, seq.num_prompt - CONTEXT_TOKENS)


def pack(kind: str, texts: Many[np.ndarray]) -> Snapshot:
    """A snapshot of texts: all tokens, and the length of each. Raises ConfigError for no texts."""
    if not len(texts):
        raise ConfigError("there are no responses to save; generate first")
    tokens = np.concatenate(texts).astype(np.int32)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    counts = {"tokens": len(tokens), "texts": len(texts)}
    return Snapshot(kind, {"tokens": tokens, "lengths": lengths}, {}, counts)


def unpack(snapshot: Snapshot) -> list[np.ndarray]:
    """The texts of a snapshot, oldest first. Raises DataError for invalid arrays."""
    arrays = snapshot.arrays
    if arrays.keys() != {"tokens", "lengths"} or not _are_texts(**arrays):
        raise DataError(
            "expected the tokens and lengths of texts, got invalid arrays; use another memory file"
        )
    return np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])


def _are_texts(tokens: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether arrays from a file are valid."""
    return (
        tokens.dtype == np.int32
        and lengths.dtype == np.int64
        and tokens.ndim == lengths.ndim == 1
        and bool((tokens >= 0).all() and (lengths >= 0).all() and (lengths <= len(tokens)).all())
        and int(lengths.sum()) == len(tokens)
    )


def merge(snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
    """Merges snapshots; beyond `max_bytes` the first texts are dropped, never the last one."""
    texts = [text for snapshot in snapshots for text in unpack(snapshot)]
    limit = np.inf if max_bytes is None else max_bytes
    sizes = np.cumsum([4 * len(text) + 8 for text in reversed(texts)])
    num_kept = max(1, int(np.searchsorted(sizes, limit, "right")))
    return pack(snapshots[0].kind, texts[-num_kept:])
