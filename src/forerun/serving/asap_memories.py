"""What `constraint_sampling: asap` learns on a server: a bounded memory for each tenant.

A request with a seed has a memory of its own, because other requests must not change its text. All
memories end with their engine, as those of drafters do.
"""

from __future__ import annotations

from threading import Lock

from forerun.constraints.asap import AsapMemory
from forerun.serving.jobs import Job

MAX_BYTES = 256 << 20  # of all tenants; as much again for requests with seeds that run at once


class AsapMemories:
    """The memories of a server. Tenants have equal shares, so that none drops what others keep."""

    def __init__(self, num_tenants: int, max_seqs: int, max_bytes: int = MAX_BYTES) -> None:
        self._share, self._seeded_share = max_bytes // max(num_tenants, 1), max_bytes // max_seqs
        self._by_tenant: dict[str, AsapMemory] = {}
        self._lock = Lock()

    def of(self, job: Job) -> AsapMemory:
        """The memory that a request uses."""
        if job.is_seeded:
            return AsapMemory(self._seeded_share // len(job.prompts), is_shared=False)
        with self._lock:
            return self._by_tenant.setdefault(job.tenant, AsapMemory(self._share))

    def clear(self) -> None:
        """Forgets everything."""
        for memory in self._all():
            memory.clear()

    @property
    def num_prompts(self) -> int:
        """Prompts with bounds, of all tenants."""
        return sum(len(memory.tries) for memory in self._all())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tenants."""
        return sum(memory.num_bytes for memory in self._all())

    def _all(self) -> list[AsapMemory]:
        with self._lock:
            return list(self._by_tenant.values())
