"""What runs at the moment: the engine, its sequences, and what is to be told about them.

Belongs to the engine's thread. A step that fails is tried again sequence by sequence, so that only
the request at fault is dropped; if the engine itself cannot go on it is made anew.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from forerun.core.records import Sequence
from forerun.core.scopes import kept_key
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder
from forerun.errors import CapacityError, ConfigError
from forerun.serving.active_sequences import Choice, Progress, sequences
from forerun.serving.admission import Group
from forerun.serving.errors import ApiError, of_fault
from forerun.serving.jobs import End, Event, Job
from forerun.serving.metrics import Metrics
from forerun.serving.routing import Plans, Router, constrain
from forerun.serving.traces import Traces

log = logging.getLogger("forerun.serving")
Make = Callable[[Recorder], tuple[Engine, Router, Plans]]
Hear = Callable[[Job], None]


class Batch:
    """The running sequences. on_left: one of a job has ended; on_gone: the whole job has."""

    def __init__(self, make: Make, metrics: Metrics, on_left: Hear, on_gone: Hear) -> None:
        self._make, self.metrics = make, metrics
        self._on_left, self._on_gone = on_left, on_gone
        self._progress: dict[Job, Progress] = {}
        self._choices: dict[Sequence, Choice] = {}
        self._outbox: list[tuple[Job, Event]] = []
        self.lasted: deque[float] = deque([1.0], maxlen=32)  # seconds that requests took
        self._build()

    @property
    def num_running(self) -> int:
        return len(self._choices)

    @property
    def num_free(self) -> int:
        """Places for newcomers."""
        return self.engine.scheduler.max_seqs - len(self._choices)

    @property
    def is_idle(self) -> bool:
        return not self._choices and self.engine.scheduler.is_idle

    def jobs(self) -> list[Job]:
        """Requests of which something runs."""
        return list(self._progress)

    def events(self) -> list[tuple[Job, Event]]:
        """What has happened since the last call."""
        events, self._outbox = self._outbox, []
        return events

    def begin(self, group: Group) -> None:
        """The sequences of one prompt join, or their request is told why they cannot."""
        if group.job.is_over:  # another of its prompts has failed in this very step
            return
        try:
            self._join(group)
        except Exception as fault:
            if not isinstance(fault, ConfigError | CapacityError):
                log.exception("a request could not join")
            self.fail(group.job, of_fault(fault))

    def _join(self, group: Group) -> None:
        job = group.job
        progress = self._progress.get(job)
        if progress is None:
            progress = self._progress[job] = Progress.of(job)
        choices = sequences(group, self.engine.target.context)
        is_own = job.is_seeded or progress.expected is not None
        seqs = [choice.seq for choice in choices]
        # who has a seed drafts as if nobody else were here
        has_room = job.is_seeded or self._has_room(job.method, seqs)
        method = job.method if has_room else "none"
        self.plans.assign(seqs, method, job.nodes, is_own)
        for choice in choices:
            seq = choice.seq
            self.router.assign(seq, method, progress.prediction())
            constrain(self.engine.shapers, seq, job.constraints)
            if job.traces:
                choice.trace = self.traces.watch(seq, method)
            progress.choices[choice.number] = self._choices[seq] = choice
            self.engine.submit(seq)
        self.metrics.prompt_tokens.inc(group.num_tokens)

    def _has_room(self, method: str, seqs: list[Sequence]) -> bool:
        """Whether what a method drafts with fits beside the target's own cells for these.

        Drafts only save time: a request goes on without them, and the next one is asked for anew.
        """
        target, longest = self.engine.target, max(seq.num_prompt + seq.limit for seq in seqs)
        try:
            taken = target.check_room(len(self._choices) + len(seqs), longest)
            self.router.by_name[method].check_room(len(seqs), longest, taken)
        except CapacityError as why:
            log.warning("a request goes on without drafts of %s, for want of room: %s", method, why)
            return False
        return True

    def step(self) -> None:
        """One step for all; afterwards `events` tells what came of it."""
        with self.engine.target.turns:
            self._step()

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as fault:
            self._isolate(fault)
        now = time.monotonic()
        for choice in list(self._choices.values()):
            if choice.job.is_over:  # another choice of it has failed just now
                continue
            try:
                self._report(choice, now)
            except Exception as fault:
                log.exception("what came of a request cannot be told")
                self.fail(choice.job, of_fault(fault))
        if self._dismissed:
            self._clear()

    def drop(self, job: Job) -> None:
        """Ends the sequences of a request; their state is freed at the next step."""
        for choice in [c for c in self._choices.values() if c.job is job]:
            self.engine.cancel(choice.seq)
            self._forget(choice)
        self._dismiss(job)

    def fail(self, job: Job, error: ApiError) -> None:
        """Drops a request and tells it why."""
        self._outbox.append((job, error))
        self.drop(job)

    def start_anew(self, fault: Exception, joining: Iterable[Job] = ()) -> None:
        """Drops all that runs or was about to, and makes a new engine on the same target."""
        self.metrics.faults.inc()
        for seq in list(self._choices):
            with suppress(Exception):
                self.engine.target.release(seq)
        for job in dict.fromkeys([*self.jobs(), *joining]):
            if not job.is_over:
                self.fail(job, of_fault(fault))
        self._build()

    def _build(self) -> None:
        self.recorder, self.traces = Recorder(), Traces()
        self._dismissed: list[Job] = []  # what they taught is to be forgotten at the end of a step
        self.engine, self.router, self.plans = self._make(self.recorder)
        self.engine.listeners.append(self.traces)

    def _report(self, choice: Choice, now: float) -> None:
        """Tells what is new of one choice; an ended one leaves."""
        job, seq = choice.job, choice.seq
        self._measure(choice, now)
        piece = choice.news(self.engine.stops) if job.streams or seq.finish else None
        if piece is not None:
            self._outbox.append((job, piece))
        if seq.finish is not None:
            self._leave(choice, self._progress[job])

    def _measure(self, choice: Choice, now: float) -> None:
        seq, new = choice.seq, choice.seq.num_generated - choice.num_seen
        if not new:
            return
        if not choice.num_seen:
            self.metrics.first_token.observe(now - choice.job.arrived)
            if seq.index == 0:  # the other samples of a prompt share its cells in any case
                self._count_reuse(choice)
        else:
            self.metrics.between.observe((now - choice.last) / new)
        choice.num_seen, choice.last = seq.num_generated, now

    def _count_reuse(self, choice: Choice) -> None:
        """How much of the prompt an earlier request had left in the cache."""
        found = self.engine.target.reused(choice.seq)
        self._progress[choice.job].count.cached += found
        self.metrics.cache_queries.inc(choice.seq.num_prompt)
        self.metrics.cache_hits.inc(found)

    def _leave(self, choice: Choice, progress: Progress) -> None:
        """A sequence has ended; perhaps its job has, too."""
        job, seq, count = choice.job, choice.seq, progress.count
        self.metrics.finished(seq.finish or "")
        progress.num_ended += 1
        count.completion += len(seq.generated)
        self.recorder.of(seq).failures = failures = self.router.failures(seq)
        self.metrics.failures.inc(failures)
        prediction = self.router.prediction(seq)
        if prediction is not None:
            num_said = prediction.num_said(seq.generated)
            count.accepted_prediction += num_said
            count.rejected_prediction += len(job.prediction) - num_said
        self._forget(choice)
        if progress.is_done:
            order = [progress.choices[i].seq for i in range(job.num_choices)]
            stats = [self.recorder.of(seq) for seq in order]
            self._outbox.append((job, End(count, stats, [*map(self.router.method, order)])))
            seconds = time.monotonic() - job.arrived
            self.metrics.whole.observe(seconds)
            self.lasted.append(seconds)
            self._dismiss(job)

    def _isolate(self, fault: Exception) -> None:
        """Steps every sequence alone; the jobs of those that fail are dropped, others move on."""
        self.metrics.faults.inc()
        log.error("a step failed, and its sequences are tried one by one", exc_info=fault)
        running = [seq for seq in self.engine.scheduler.running if seq.finish is None]
        waiting = set(self.engine.scheduler.waiting)
        for seq, choice in list(self._choices.items()):
            if seq.finish is None and seq not in waiting and seq not in running:
                self.fail(choice.job, of_fault(fault))  # it was lost while it joined
        for seq in running:
            if seq not in self._choices:  # its job has failed meanwhile
                continue
            try:
                self.engine.round([seq])
            except Exception as own_fault:
                self.fail(self._choices[seq].job, of_fault(own_fault))
        self.engine.retire()

    def _forget(self, choice: Choice) -> None:
        self._choices.pop(choice.seq, None)
        self._on_left(choice.job)

    def _dismiss(self, job: Job) -> None:
        """No sequence of this job will come any more."""
        job.is_over = True
        if self._progress.pop(job, None) is not None:
            self._dismissed.append(job)
        self._on_gone(job)

    def _clear(self) -> None:
        """The router forgets who was dismissed: none teaches any more once it has retired."""
        self.engine.retire()
        jobs, self._dismissed = self._dismissed, []
        for job in jobs:
            for i in range(len(job.prompts)):
                self.router.forget((job.number, i))
                if job.is_seeded:
                    self.router.forget(kept_key("tenant", job.taught(i)))
