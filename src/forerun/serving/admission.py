"""Admission of requests: a bounded queue per tenant, fair sharing, starvation-free.

The unit is one prompt with all its n samples. They start in the same step, so the prompt is
computed once, and what they learn from each other does not depend on other requests.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from forerun.serving.errors import ApiError
from forerun.serving.jobs import Job


@dataclass(frozen=True)
class Group:
    """One prompt of a job; its n samples run together."""

    job: Job
    prompt: int

    @property
    def size(self) -> int:
        return self.job.sampling.n

    @property
    def num_tokens(self) -> int:
        return len(self.job.prompts[self.prompt])


class Admission:
    """The queue of waiting requests.

    max_waiting: requests per tenant in the queue, not counting those that could run at once.
    max_seqs: total number of sequences. Not thread-safe.
    """

    def __init__(self, max_waiting: int, max_seqs: int) -> None:
        self.max_waiting, self.max_seqs = max_waiting, max_seqs
        self._waiting: dict[Job, deque[Group]] = {}  # in the order of arrival
        self._running: Counter[str | Job] = Counter()  # sequences by tenant and by job
        self._num_running = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_sequences(self) -> int:
        """Number of waiting sequences."""
        return sum(self._sizes().values())

    def add(self, job: Job, retry_after: float) -> None:
        """Queues a request. Raises ApiError 429 if too many of its tenant wait."""
        if self._num_without_slot(job) > self.max_waiting:
            raise ApiError(
                429,
                f"your queue of {self.max_waiting} waiting requests is full; try again in about "
                f"{max(1, round(retry_after))} s",
                code="queue_full",
                retry_after=retry_after,
            )
        self._waiting[job] = deque(Group(job, i) for i in range(len(job.prompts)))

    def _num_without_slot(self, job: Job) -> int:
        """Requests of the new job's tenant, including it, that cannot run at once."""
        free, count = self.max_seqs - self._num_running, 0
        for other, size in (self._sizes() | {job: job.num_choices}).items():
            free -= size
            count += free < 0 and other.tenant == job.tenant
        return count

    def _sizes(self) -> dict[Job, int]:
        """Number of waiting sequences by request, in the order of arrival."""
        return {job: len(groups) * job.sampling.n for job, groups in self._waiting.items()}

    def take(self, slots: int, tokens: int) -> list[Group]:
        """The next groups that fit into the free slots, up to `tokens` prompt tokens or one group.

        Next is the tenant with the fewest running sequences, then the request with the fewest, then
        the first to arrive. A group that does not fit blocks the queue, so that it is not starved.
        """
        taken: list[Group] = []
        while self._waiting:
            job = min(self._waiting, key=lambda j: (self._running[j.tenant], self._running[j]))
            group = self._waiting[job][0]
            if group.size > slots or (taken and group.num_tokens > tokens):
                break
            taken.append(self._waiting[job].popleft())
            slots, tokens = slots - group.size, tokens - group.num_tokens
            self._count(job, group.size)
            if not self._waiting[job]:
                del self._waiting[job]
        return taken

    def release(self, job: Job) -> None:
        """Frees the slot of one ended sequence of a request."""
        self._count(job, -1)

    def drop(self, job: Job) -> bool:
        """Removes a request and frees its slots; returns whether it was waiting."""
        if self._running[job]:
            self._count(job, -self._running[job])
        return self._waiting.pop(job, None) is not None

    def jobs(self) -> list[Job]:
        """The requests with waiting prompts."""
        return list(self._waiting)

    def _count(self, job: Job, change: int) -> None:
        self._num_running += change
        for key in (job.tenant, job):
            self._running[key] += change
            if not self._running[key]:
                del self._running[key]
