"""What responses said, for drafters that copy: each sequence's own text, and those it may share.

A sequence reads its own prompt and output into a store of its own, and its output into the store of
its scope, where running and earlier responses are found by others. All shared stores are under one
budget: those nobody uses go first, the least recently used first; then a store drops its oldest
texts. What is saved is the texts, since any store can be built from them.

A drafter that is seldom asked reads seldom: `join` reads nothing, `follow` what a sequence has said
since, `gather` what others have. Responses that ended unread wait, within a share of the budget.
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

LEAD = 8  # prompt tokens kept before a response, so that its beginning has a context
TAIL = 16  # tokens compared to notice that a text was changed rather than extended
PIECE = 512  # tokens of ended responses, about, that are read at once
UNREAD = 16  # the part of the budget that unread responses may hold; the oldest go first


class Store(Protocol):
    """Texts that can be matched: a suffix tree, an automaton."""

    budget: int

    @property
    def nbytes(self) -> int: ...
    def growth(self, num: int) -> int: ...
    def begin(self, context: Many[int] = ()) -> Any: ...
    def extend(self, text: Any, tokens: Many[int]) -> Any: ...
    def end(self, text: Any) -> None: ...
    def held(self) -> list[np.ndarray]: ...


Own = TypeVar("Own", bound=Store)
Common = TypeVar("Common", bound=Store)


@dataclass(eq=False)
class Reader(Generic[Own, Common]):
    """What a sequence has read: `text` in its own store, `entry` in the shared one, if any."""

    make: Callable[[], Own]
    key: Hashable
    shared: Common | None
    entry: Any
    length: int = 0  # tokens read into the shared store
    tail: list[int] = field(default_factory=list)  # the last of them
    num_own: int = 0  # tokens read into its own

    @cached_property
    def own(self) -> Own:
        return self.make()

    @cached_property
    def text(self) -> Any:
        return self.own.begin()

    def fits(self, tokens: list[int]) -> bool:
        """Whether `tokens` continues what was read."""
        return tokens[self.length - len(self.tail) : self.length] == self.tail


class Responses(Generic[Own, Common]):
    """Own stores of running sequences, shared ones by scope. name: of the drafter."""

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
        self._held: OrderedDict[Hashable, Common] = OrderedDict()  # least recently used first
        self._users: dict[Hashable, weakref.WeakSet[Sequence]] = {}
        # who may be gathered, in order
        self._joined: dict[Hashable, weakref.WeakKeyDictionary[Sequence, None]] = {}
        self._unread: OrderedDict[Hashable, deque[np.ndarray]] = OrderedDict()  # responses, ended
        self._num_unread = 0  # their bytes
        self._target: weakref.ref[Target] | None = None
        self._largest = -1  # token of what was restored
        shared(budget)  # refuses bad options now rather than at the first sequence

    def bind(self, target: Target) -> None:
        """Texts of another target go. Raises ConfigError if restored ones exceed its vocabulary."""
        if self._target is not None and self._target() is not target:
            self._held.clear()
            self._readers.clear()
            self._unread.clear()
            self._num_unread = 0
            self._largest = -1
        self._target = weakref.ref(target)
        self._check(self._largest)

    def join(self, seq: Sequence) -> None:
        """A sequence that `gather` may read; nothing is read now."""
        if (key := self._key(seq)) is not None:
            self._joined.setdefault(key, weakref.WeakKeyDictionary())[seq] = None

    def follow(self, seq: Sequence) -> Reader[Own, Common]:
        """The sequence's reader, brought up to its last token."""
        reader = self._share(seq)
        if reader.num_own < len(seq.tokens):
            reader.own.extend(reader.text, seq.tokens[reader.num_own :])
            reader.num_own = len(seq.tokens)
        return reader

    def gather(self, seqs: Many[Sequence]) -> None:
        """Reads into shared stores what all who joined have said, of ended ones some at a time."""
        for key in dict.fromkeys(map(self._key, seqs)):
            for ref in self._joined[key].keyrefs() if key in self._joined else ():
                if (other := ref()) is not None:
                    self._share(other)
            if key in self._unread:
                self._read(key, PIECE)

    def finish(self, seq: Sequence) -> None:
        """The sequence has ended; what it said stays with those it shares with."""
        key = self._key(seq)
        joined = self._joined.get(key, weakref.WeakKeyDictionary())
        if seq in self._readers:
            reader = self._share(seq)  # it may have gone on without drafts
            if reader.shared is not None:
                reader.shared.end(reader.entry)
            del self._readers[seq]
        elif seq in joined:
            self._put_off(key, seq)
        joined.pop(seq, None)
        if not joined:
            self._joined.pop(key, None)
        users = self._users.get(key, weakref.WeakSet())
        users.discard(seq)
        if not len(users):
            self._users.pop(key, None)

    def forget(self, group: Hashable) -> None:
        """Nobody of this group will come any more."""
        self._held.pop(group, None)
        self._num_unread -= sum(text.nbytes for text in self._unread.pop(group, ()))

    def report(self) -> dict[str, int]:
        """Bytes by part."""
        own = sum(reader.own.nbytes for reader in self._readers.values() if reader.num_own)
        shared = sum(store.nbytes for store in self._held.values())
        return {"own texts": own, "shared texts": shared, "unread texts": self._num_unread}

    def keep(self, tenant: str) -> None:
        """Raises ConfigError unless responses of this tenant alone outlive requests."""
        if self.scope in ("request", "group") or (self.scope == "global" and tenant):
            raise ConfigError(
                "expected responses that are one tenant's alone and outlive requests, but "
                f"the scope is {self.scope!r}; use {self.name}:scope=tenant"
            )

    def snapshot(self, tenant: str) -> Snapshot:
        """The texts of a tenant. Raises ConfigError if there are none."""
        self.keep(tenant)
        key = self._kept_key(tenant)
        self._read(key)
        store = self._held.get(key)
        return pack(self.name, [] if store is None else store.held())

    def restore(self, snapshot: Snapshot, tenant: str) -> None:
        """A tenant's store holds the texts of a snapshot, and nothing else.

        Into it sequences that run are read anew, when they next draft or when they end.
        """
        self.keep(tenant)
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
        """Raises ConfigError where the target has no such token."""
        target = None if self._target is None else self._target()
        if target is not None and largest >= target.vocab_size:
            raise ConfigError(
                f"the texts to be restored hold token {largest}, but the ids of this model "
                f"end at {target.vocab_size - 1}; use a memory of the same tokenizer"
            )

    def _open(self, seq: Sequence) -> Reader[Own, Common]:
        """A reader that has read the prompt but for its end, which is shared as well."""
        before = seq.tokens[: _lead(seq)]
        key = self._key(seq)
        shared = None if key is None else self._store(key)
        entry = None if shared is None else shared.begin(before)
        if key is not None:
            self._users.setdefault(key, weakref.WeakSet()).add(seq)
        return Reader(self._own, key, shared, entry, len(before), before[-TAIL:])

    def _share(self, seq: Sequence) -> Reader[Own, Common]:
        """The sequence's reader; all that it has said is in the shared store."""
        reader = self._readers.get(seq)
        if reader is None or not reader.fits(seq.tokens):
            reader = self._readers[seq] = self._open(seq)
        new = seq.tokens[reader.length :]
        if new:
            if reader.shared is not None:
                if growth := reader.shared.growth(len(new)):
                    self._make_room(reader.key, growth)
                reader.shared.extend(reader.entry, new)
            reader.length, reader.tail = len(seq.tokens), seq.tokens[-TAIL:]
        return reader

    def _put_off(self, key: Hashable, seq: Sequence) -> None:
        """A response that has ended waits; the oldest go where too many do."""
        text = np.array(seq.tokens[_lead(seq) :], np.int32)
        self._unread.setdefault(key, deque()).append(text)
        self._unread.move_to_end(key)
        self._num_unread += text.nbytes
        while self._num_unread > self.budget // UNREAD:
            oldest = next(iter(self._unread))
            self._num_unread -= self._unread[oldest].popleft().nbytes
            if not self._unread[oldest]:
                del self._unread[oldest]

    def _read(self, key: Hashable, most: int | None = None) -> None:
        """Reads ended responses, the oldest first, until they have `most` tokens or more."""
        waiting, done = self._unread.get(key), 0
        while waiting and (most is None or done < most):
            text = waiting.popleft()
            self._num_unread -= text.nbytes
            self._add(key, text)
            done += len(text)
        if waiting is not None and not waiting:
            del self._unread[key]

    def _add(self, key: Hashable, text: np.ndarray) -> None:
        """A response that grows no more."""
        store = self._store(key)
        self._make_room(key, store.growth(len(text)))
        entry = store.begin()
        store.extend(entry, text.tolist())
        store.end(entry)

    def _store(self, key: Hashable) -> Common:
        if key not in self._held:
            self._held[key] = self._new(self.budget)
            self._make_room(key, 0)
        self._held.move_to_end(key)
        return self._held[key]

    def _make_room(self, key: Hashable, growth: int) -> None:
        """For `growth` bytes more in one store: idle ones go, the least recently used first."""
        held = self._num_unread + sum(store.nbytes for store in self._held.values())
        for other in list(self._held):
            if held + growth <= self.budget:
                break
            if other != key and not len(self._users.get(other, ())):
                held -= self._held.pop(other).nbytes
        for store in self._held.values():
            store.budget = self.budget - held + store.nbytes

    def _key(self, seq: Sequence) -> Hashable:
        """Who shares: everybody, a tenant, a group, or nobody (None)."""
        if self.scope in ("tenant", "global"):
            return self._kept_key(seq.tenant)
        return seq.group if self.scope == "group" else None

    def _kept_key(self, tenant: str) -> Hashable:
        return ("tenant", tenant) if self.scope == "tenant" else "global"


def _lead(seq: Sequence) -> int:
    """Where its response begins, with the last of the prompt before it."""
    return max(0, seq.num_prompt - LEAD)


def pack(kind: str, texts: Many[np.ndarray]) -> Snapshot:
    """Texts as they are saved: all tokens, and how many each has. Raises ConfigError for none."""
    if not len(texts):
        raise ConfigError("there is no response yet, so there is nothing to save; generate first")
    tokens = np.concatenate(texts).astype(np.int32)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    counts = {"tokens": len(tokens), "texts": len(texts)}
    return Snapshot(kind, {"tokens": tokens, "lengths": lengths}, {}, counts)


def unpack(snapshot: Snapshot) -> list[np.ndarray]:
    """The texts of a snapshot, oldest first. Raises DataError if it is none of texts."""
    arrays = snapshot.arrays
    if arrays.keys() != {"tokens", "lengths"} or not _are_texts(**arrays):
        raise DataError(
            "expected texts, their tokens and their lengths, got arrays that are none; use another "
            "memory file"
        )
    return np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])


def _are_texts(tokens: np.ndarray, lengths: np.ndarray) -> bool:
    """They may come from anybody."""
    return (
        tokens.dtype == np.int32
        and lengths.dtype == np.int64
        and tokens.ndim == lengths.ndim == 1
        and bool((tokens >= 0).all() and (lengths >= 0).all() and (lengths <= len(tokens)).all())
        and int(lengths.sum()) == len(tokens)
    )


def merge(snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
    """All texts of several snapshots in order; beyond `max_bytes` the first go, never the last."""
    texts = [text for snapshot in snapshots for text in unpack(snapshot)]
    room = np.inf if max_bytes is None else max_bytes
    sizes = np.cumsum([4 * len(text) + 8 for text in reversed(texts)])
    num_kept = max(1, int(np.searchsorted(sizes, room, "right")))
    return pack(snapshots[0].kind, texts[-num_kept:])
