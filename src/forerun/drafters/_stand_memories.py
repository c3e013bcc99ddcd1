"""The logit memories of STAND by scope: which sequences share one, and which are saved."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from forerun.core.records import Sequence, Snapshot
from forerun.core.scopes import WIDE, kept_key, keys_of
from forerun.errors import ConfigError
from forerun.ngrams.tables.logits import serialize
from forerun.ngrams.tables.logits.pool import MAX_FALLBACK_SHARE, Memories
from forerun.ngrams.tables.logits.table import LogitMemory, context_lengths


class ScopedMemories:
    """Memories by scope and tenant, under one budget of bytes.

    In a wide scope a sequence has a memory of its group, with that of the scope behind it. The
    groups of a kept tenant share one memory, which is saved.
    """

    def __init__(
        self, scope: str, store: str, *, context: int | tuple[int, ...], entries: int, budget: int
    ) -> None:
        self.scope, self.store = scope, store
        self._pool = Memories(context=context, entries=entries, budget=budget)
        self._kept: set[str] = set()  # tenants of scope group that are kept

    @property
    def nbytes(self) -> int:
        """Bytes of all memories."""
        return self._pool.nbytes

    def of(self, seq: Sequence) -> LogitMemory:
        """The memory that a sequence drafts from, with that of a wide scope behind it."""
        keys = self._keys(seq)
        if len(keys) == 1:
            return self._pool[keys[0]]
        wide, own = self._pool[keys[0]], self._pool[keys[1]]
        own.set_fallback(wide)
        return own

    def stores_model(self, seq: Sequence) -> bool:
        """Whether the law at temperature 1 is stored, whatever the request."""
        is_wide = self.scope in WIDE or seq.tenant in self._kept
        return self.store == "model" or (self.store == "auto" and is_wide)

    def join(self, seq: Sequence) -> None:
        """A sequence begins to use its memories."""
        for key in self._keys(seq):
            self._pool.add_user(key, seq)

    def leave(self, seq: Sequence) -> None:
        """A sequence has ended. A group's memory stays for trajectories that may still come."""
        for key in self._keys(seq):
            self._pool.remove_user(key, seq)
        if seq.group is None or self.scope == "request":
            self._pool.forget(seq)

    def forget(self, group: Hashable) -> None:
        """Drops the memories of a group, or of a tenant."""
        self._pool.forget(group)

    def teach(self, memory: LogitMemory, tokens: list[int], before: int, laws: np.ndarray) -> None:
        """See `Memories.learn`."""
        self._pool.learn(memory, tokens, before, laws)

    def enlarge(self, memory: LogitMemory, num_nodes: int) -> None:
        """Makes room for the contexts of so many nodes, also in the fallback."""
        for one in (memory.fallback, memory):
            if one is not None:
                self._pool.enlarge(one, num_nodes * len(one.lengths))

    def keep(self, tenant: str) -> None:
        """As `Persistent.keep`."""
        if self.scope == "request":
            raise ConfigError(
                "a memory of scope request ends with its request, so there is nothing to save; use "
                "stand:scope=tenant"
            )
        if self.scope == "global" and tenant:
            raise ConfigError(
                f"a memory of scope global belongs to all, not to tenant {tenant!r}; use "
                "stand:scope=tenant"
            )
        if self.scope == "group" and tenant not in self._kept:
            with self._pool.moving(tenant, self._keys):
                self._kept.add(tenant)

    def release(self, tenant: str) -> None:
        """As `Persistent.release`."""
        if tenant in self._kept:
            with self._pool.moving(tenant, self._keys):
                self._pool.drop(self._kept_key(tenant))
                self._kept.discard(tenant)

    def snapshot(self, tenant: str) -> Snapshot:
        """As `Persistent.snapshot`."""
        self.keep(tenant)
        memory = self._pool[self._kept_key(tenant)]
        counts = {"tokens": memory.observed, "evicted": memory.evicted}
        rows, chances = memory.rows(), memory.chances
        return serialize.to_snapshot("stand", rows, self._settings, counts, chances)

    def restore(self, snapshot: Snapshot, tenant: str) -> None:
        """As `Persistent.restore`."""
        snapshot.expect("stand")
        snapshot.check(self._settings)
        rows, chances = serialize.from_snapshot(snapshot)
        self.keep(tenant)
        memory = self._pool.reset(self._kept_key(tenant))
        memory.chances = chances
        self._pool.make_room(memory.growth(len(rows.keys)))
        memory.budget = min(memory.budget, int(MAX_FALLBACK_SHARE * self._pool.budget))
        memory.load_rows(rows, snapshot.counts["tokens"])
        memory.evicted += snapshot.counts["evicted"]

    @property
    def _settings(self) -> dict[str, Any]:
        """What two saved memories must agree in."""
        lengths = list(context_lengths(self._pool.context))
        store = "processed" if self.store == "processed" else "model"
        return {"context": lengths, "entries": self._pool.entries, "store": store}

    def _scope(self, tenant: str) -> str:
        return "tenant" if tenant in self._kept else self.scope

    def _keys(self, seq: Sequence) -> tuple[Hashable, ...]:
        return keys_of(self._scope(seq.tenant), seq)

    def _kept_key(self, tenant: str) -> Hashable:
        return kept_key(self._scope(tenant), tenant)
