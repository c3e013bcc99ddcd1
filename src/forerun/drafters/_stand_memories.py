"""The logit memories of STAND: which sequences share one by scope, and which are saved."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from forerun.core.records import Sequence, Snapshot
from forerun.core.scopes import LASTING_SCOPES, kept_key, keys_of
from forerun.errors import ConfigError
from forerun.ngrams.tables.logits import serialize
from forerun.ngrams.tables.logits.pool import MAX_FALLBACK_SHARE, Memories
from forerun.ngrams.tables.logits.table import LogitMemory, context_lengths


class ScopedMemories:
    """Memories by scope and tenant, with a common budget in bytes.

    In a wide scope a sequence uses the memory of its group first, then that of the scope. The
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
        """The memory that a sequence drafts from, with the wide scope's as fallback."""
        keys = self._keys(seq)
        if len(keys) == 1:
            return self._pool[keys[0]]
        wide, own = self._pool[keys[0]], self._pool[keys[1]]
        own.set_fallback(wide)
        return own

    def stores_model(self, seq: Sequence) -> bool:
        """Whether distributions at temperature 1 are stored, independent of the request."""
        is_wide = self.scope in LASTING_SCOPES or seq.tenant in self._kept
        return self.store == "model" or (self.store == "auto" and is_wide)

    def join(self, seq: Sequence) -> None:
        """A sequence starts to use its memories."""
        for key in self._keys(seq):
            self._pool.add_user(key, seq)

    def leave(self, seq: Sequence) -> None:
        """A sequence has ended. A group's memory stays for its other trajectories."""
        for key in self._keys(seq):
            self._pool.remove_user(key, seq)
        if seq.group is None or self.scope == "request":
            self._pool.forget(seq)

    def forget(self, group: Hashable) -> None:
        """Drops the memories of a group, or of a tenant."""
        self._pool.forget(group)

    def enlarge(self, memory: LogitMemory, num_rows: int) -> None:
        """`Memories.enlarge_for`."""
        self._pool.enlarge_for(memory, num_rows)

    def keep(self, tenant: str) -> None:
        """`Persistent.keep`."""
        if self.scope == "request":
            raise ConfigError(
                "a memory of scope request ends with its request, so there is nothing to save; use "
                "stand:scope=tenant"
            )
        if self.scope == "global" and tenant:
            raise ConfigError(
                f"a memory of scope global is shared by all tenants, not tenant {tenant!r} alone; "
                "use stand:scope=tenant"
            )
        if self.scope == "group" and tenant not in self._kept:
            with self._pool.moving(tenant, self._keys):
                self._kept.add(tenant)

    def release(self, tenant: str) -> None:
        """`Persistent.release`."""
        if tenant in self._kept:
            with self._pool.moving(tenant, self._keys):
                self._pool.drop(self._kept_key(tenant))
                self._kept.discard(tenant)

    def snapshot(self, tenant: str) -> Snapshot:
        """`Persistent.snapshot`."""
        self.keep(tenant)
        memory = self._pool[self._kept_key(tenant)]
        counts = {"tokens": memory.observed, "evicted": memory.evicted}
        rows, acceptance = memory.rows(), memory.acceptance
        return serialize.to_snapshot("stand", rows, self._settings, counts, acceptance)

    def restore(self, snapshot: Snapshot, tenant: str) -> None:
        """`Persistent.restore`."""
        snapshot.expect("stand")
        snapshot.check(self._settings)
        rows, acceptance = serialize.from_snapshot(snapshot)
        self.keep(tenant)
        memory = self._pool.reset(self._kept_key(tenant))
        memory.acceptance = acceptance
        self._pool.make_room(memory.growth(len(rows.keys)))
        memory.budget = min(memory.budget, int(MAX_FALLBACK_SHARE * self._pool.budget))
        memory.load_rows(rows, snapshot.counts["tokens"])
        memory.evicted += snapshot.counts["evicted"]

    @property
    def _settings(self) -> dict[str, Any]:
        """Settings that must be equal to restore or merge a memory."""
        lengths = list(context_lengths(self._pool.context))
        store = "processed" if self.store == "processed" else "model"
        return {"context": lengths, "entries": self._pool.entries, "store": store}

    def _scope(self, tenant: str) -> str:
        return "tenant" if tenant in self._kept else self.scope

    def _keys(self, seq: Sequence) -> tuple[Hashable, ...]:
        return keys_of(self._scope(seq.tenant), seq)

    def _kept_key(self, tenant: str) -> Hashable:
        return kept_key(self._scope(tenant), tenant)
