"""Logit memories by key, within one memory budget; unused ones are evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from forerun.core.records import Sequence
from forerun.core.scopes import near_group
from forerun.errors import ConfigError
from forerun.ngrams.tables.logits.table import LogitMemory

MAX_BUDGET_MB = 1 << 30
MAX_FALLBACK_SHARE = 0.75  # of the budget; the memories that use the fallback need the rest


class Memories:
    """LRU cache of memories by key. A memory in use is never evicted."""

    def __init__(self, *, context: int | tuple[int, ...], entries: int, budget: int) -> None:
        self.context, self.entries, self.budget = context, entries, budget
        self._memories: OrderedDict[Hashable, LogitMemory] = OrderedDict()
        self._users: dict[Hashable, WeakSet[Sequence]] = {}  # running sequences by key
        self._new()  # raises ConfigError for bad options

    def users(self) -> set[Sequence]:
        """All running sequences."""
        return {seq for users in self._users.values() for seq in users}

    @property
    def nbytes(self) -> int:
        """Bytes of all memories."""
        return sum(memory.nbytes for memory in self._memories.values())

    def add_user(self, key: Hashable, seq: Sequence) -> None:
        """Marks the memory of a key as used by a sequence."""
        if key not in self._users:
            self._users[key] = WeakSet()
        self._users[key].add(seq)

    def remove_user(self, key: Hashable, seq: Sequence) -> None:
        """Ends the use of a memory by a sequence; the memory may then be evicted."""
        users = self._users.get(key)
        if users is not None:
            users.discard(seq)
            if not len(users):
                del self._users[key]

    @contextmanager
    def moving(self, tenant: str, keys: Callable[[Sequence], Iterable[Hashable]]) -> Iterator[None]:
        """Moves a tenant's running sequences to other keys: `keys` is called before and after."""
        running = [seq for seq in self.users() if seq.tenant == tenant]
        for seq in running:
            for key in keys(seq):
                self.remove_user(key, seq)
        yield
        for seq in running:
            for key in keys(seq):
                self.add_user(key, seq)

    def drop(self, key: Hashable) -> None:
        """Removes the memory of a key, and all memories with it as fallback."""
        self._users.pop(key, None)
        dropped = self._memories.pop(key, None)
        if dropped is not None:
            for other in [k for k, memory in self._memories.items() if memory.fallback is dropped]:
                del self._memories[other]

    def forget(self, group: Hashable) -> None:
        """Removes the memory of a group, with those it has in front of a fallback."""
        for key in [group, *(k for k in self._memories if near_group(k) == (group,))]:
            self.drop(key)

    def __getitem__(self, key: Hashable) -> LogitMemory:
        """The memory of a key; a new one if there is none."""
        if key not in self._memories:
            self._memories[key] = self._new()
            self.make_room(0)
        self._memories.move_to_end(key)
        return self._memories[key]

    def reset(self, key: Hashable) -> LogitMemory:
        """Replaces the memory of a key by an empty one; see `drop`."""
        users = self._users.get(key)
        self.drop(key)
        if users:
            self._users[key] = users
        return self[key]

    def enlarge_for(self, memory: LogitMemory, num_rows: int) -> None:
        """Enlarges a memory and its fallback for the contexts of `num_rows` distributions."""
        for one in (memory.fallback, memory):
            if one is not None:
                self.enlarge(one, num_rows * len(one.lengths))

    def enlarge(self, memory: LogitMemory, num_new: int) -> None:
        """Enlarges a memory for `num_new` more contexts, within the budget."""
        if growth := memory.growth(num_new):
            self.make_room(growth)
            memory.enlarge(num_new)

    def make_room(self, growth: int) -> None:
        """Evicts unused memories, least recently used first, to free `growth` bytes.

        Then sets the budget of every memory.
        """
        total = self.nbytes
        for key in list(self._memories)[:-1]:
            if total + growth <= self.budget:
                break
            if not len(self._users.get(key, ())):
                self.drop(key)
                total = self.nbytes
        for memory in self._memories.values():
            memory.budget = self.budget - total + memory.nbytes
        limit = int(MAX_FALLBACK_SHARE * self.budget)
        for memory in self._memories.values():
            if memory.fallback is not None:
                memory.fallback.budget = min(memory.fallback.budget, limit)

    def _new(self) -> LogitMemory:
        return LogitMemory(context=self.context, entries=self.entries, budget=self.budget)


def in_bytes(mb: float, name: str = "budget_mb") -> int:
    """Bytes of `mb` MiB. Raises ConfigError for a size out of range."""
    if not 0 < mb <= MAX_BUDGET_MB:
        raise ConfigError(
            f"{name} must be above 0 and at most {MAX_BUDGET_MB}, got {mb:g}; 64 is usual"
        )
    return int(mb * 2**20)
