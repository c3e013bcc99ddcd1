"""Several logit memories under one budget of bytes: who uses which, and which must go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import numpy as np

from forerun.core.records import Sequence
from forerun.core.scopes import near_group
from forerun.errors import ConfigError
from forerun.ngrams.tables.logits.table import LogitMemory

MOST_MB = 1 << 30  # of a budget
FAR = 0.75  # of the budget, at most, for a memory behind others: they need room beside it


class Memories:
    """Memories by key, the least recently used first. One in use is never dropped as a whole."""

    def __init__(self, *, context: int | tuple[int, ...], entries: int, budget: int) -> None:
        self.context, self.entries, self.budget = context, entries, budget
        self._held: OrderedDict[Hashable, LogitMemory] = OrderedDict()
        self._users: dict[Hashable, WeakSet[Sequence]] = {}  # running sequences by memory
        self._new()  # refuses bad options now rather than at the first sequence

    def users(self) -> set[Sequence]:
        """Those that run."""
        return {seq for users in self._users.values() for seq in users}

    @property
    def nbytes(self) -> int:
        """Bytes of all memories."""
        return sum(memory.nbytes for memory in self._held.values())

    def join(self, key: Hashable, seq: Sequence) -> None:
        """A sequence begins to use a memory."""
        if key not in self._users:
            self._users[key] = WeakSet()
        self._users[key].add(seq)

    def leave(self, key: Hashable, seq: Sequence) -> None:
        """A sequence has ended; its memory may be dropped when room is needed."""
        users = self._users.get(key)
        if users is not None:
            users.discard(seq)
            if not len(users):
                del self._users[key]

    @contextmanager
    def moving(self, tenant: str, keys: Callable[[Sequence], Iterable[Hashable]]) -> Iterator[None]:
        """A tenant's running sequences leave their memories, and join what `keys` says then."""
        running = [seq for seq in self.users() if seq.tenant == tenant]
        for seq in running:
            for key in keys(seq):
                self.leave(key, seq)
        yield
        for seq in running:
            for key in keys(seq):
                self.join(key, seq)

    def drop(self, key: Hashable) -> None:
        """Nobody will use this memory any more, nor any that leans on it."""
        self._users.pop(key, None)
        gone = self._held.pop(key, None)
        if gone is not None:
            for near in [k for k, memory in self._held.items() if memory.behind is gone]:
                del self._held[near]

    def forget(self, group: Hashable) -> None:
        """Drops the memory of this key, and those that a group has before wide ones."""
        for key in [group, *(k for k in self._held if near_group(k) == (group,))]:
            self.drop(key)

    def __getitem__(self, key: Hashable) -> LogitMemory:
        """The memory of a key, made where there is none."""
        if key not in self._held:
            self._held[key] = self._new()
            self.make_room(0)
        self._held.move_to_end(key)
        return self._held[key]

    def renew(self, key: Hashable) -> LogitMemory:
        """An empty memory in place of what is there, which those that lean on it go with."""
        users = self._users.get(key)
        self.drop(key)
        if users:
            self._users[key] = users
        return self[key]

    def teach(self, memory: LogitMemory, tokens: list[int], before: int, laws: np.ndarray) -> None:
        """A memory and what is behind it learn laws as `LogitMemory.follow` does, and have room."""
        num_new = len(laws) * len(memory.lengths)
        for one in (memory.behind, memory):
            if one is not None and one.growth(num_new):
                self.enlarge(one, num_new)
        memory.follow(tokens, before, laws)

    def enlarge(self, memory: LogitMemory, num_new: int) -> None:
        """Lets a memory grow for `num_new` more contexts."""
        if growth := memory.growth(num_new):
            self.make_room(growth)
            memory.enlarge(num_new)

    def make_room(self, growth: int) -> None:
        """For `growth` bytes more in the memory used last: idle ones go, least recent first."""
        held = self.nbytes
        for key in list(self._held)[:-1]:
            if held + growth <= self.budget:
                break
            if not len(self._users.get(key, ())):
                self.drop(key)
                held = self.nbytes
        for memory in self._held.values():
            memory.budget = self.budget - held + memory.nbytes
        for memory in self._held.values():
            if memory.behind is not None:
                memory.behind.budget = min(memory.behind.budget, int(FAR * self.budget))

    def _new(self) -> LogitMemory:
        return LogitMemory(context=self.context, entries=self.entries, budget=self.budget)


def in_bytes(mb: float, name: str = "budget_mb") -> int:
    """Bytes of so many MiB. Raises ConfigError for what is no size of a memory."""
    if not 0 < mb <= MOST_MB:
        raise ConfigError(f"{name} must be above 0 and at most {MOST_MB}, got {mb:g}; 64 is usual")
    return int(mb * 2**20)
