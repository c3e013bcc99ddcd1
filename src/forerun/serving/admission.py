"""Who may run next: a bounded queue per tenant, places shared evenly, nobody overtaken for ever.

What is admitted is one prompt with all its n samples: they start in the same step, so the prompt
is computed once, and what they teach each other does not depend on who else is there.
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
    """Requests that wait, at most `max_waiting` of a tenant beside those that have places already.

    max_seqs: places in all. Not for several threads at once: whoever shares it locks it.
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
        """Sequences that wait."""
        return sum(self._sizes().values())

    def add(self, job: Job, retry_after: float) -> None:
        """Queues a request. Raises ApiError 429 if too many of its tenant wait."""
        if self._num_left_out(job) > self.max_waiting:
            raise ApiError(
                429,
                f"the queue holds {self.max_waiting} of your requests, and as many wait; try "
                f"again in about {max(1, round(retry_after))} s",
                code="queue_full",
                retry_after=retry_after,
            )
        self._waiting[job] = deque(Group(job, i) for i in range(len(job.prompts)))

    def _num_left_out(self, job: Job) -> int:
        """Requests of a newcomer's tenant, itself included, for which no places are free."""
        free, count = self.max_seqs - self._num_running, 0
        for other, size in (self._sizes() | {job: job.num_choices}).items():
            free -= size
            count += free < 0 and other.tenant == job.tenant
        return count

    def _sizes(self) -> dict[Job, int]:
        """Sequences that wait, by request, in the order of arrival."""
        return {job: len(groups) * job.sampling.n for job, groups in self._waiting.items()}

    def take(self, places: int, tokens: int) -> list[Group]:
        """The next groups that fit into the free places; prompts of `tokens` tokens, or one.

        Next is who has least: the tenant with the fewest running sequences, then the request, then
        who came first. One that does not fit yet is waited for, not overtaken.
        """
        taken: list[Group] = []
        while self._waiting:
            job = min(self._waiting, key=lambda j: (self._running[j.tenant], self._running[j]))
            group = self._waiting[job][0]
            if group.size > places or (taken and group.num_tokens > tokens):
                break
            taken.append(self._waiting[job].popleft())
            places, tokens = places - group.size, tokens - group.num_tokens
            self._count(job, group.size)
            if not self._waiting[job]:
                del self._waiting[job]
        return taken

    def left(self, job: Job) -> None:
        """One running sequence of a request has ended."""
        self._count(job, -1)

    def drop(self, job: Job) -> bool:
        """Forgets what of a request still waits and gives its places back; False if none waited."""
        if self._running[job]:
            self._count(job, -self._running[job])
        return self._waiting.pop(job, None) is not None

    def jobs(self) -> list[Job]:
        """Requests of which something waits."""
        return list(self._waiting)

    def _count(self, job: Job, change: int) -> None:
        self._num_running += change
        for key in (job.tenant, job):
            self._running[key] += change
            if not self._running[key]:
                del self._running[key]
