"""The running batch: the engine, its sequences, and their events.

Used by the engine thread only. A failed step is repeated sequence by sequence, so that only the
request with the error is dropped. If the engine itself fails, it is replaced by a new one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from forerun.constraints._request import Report
from forerun.core.records import Sequence
from forerun.core.scopes import kept_key
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder
from forerun.errors import CapacityError, ConfigError
from forerun.serving.active_sequences import Choice, Progress, sequences
from forerun.serving.admission import Group
from forerun.serving.errors import ApiError, engine_fault, given_up, no_token_left, of_fault
from forerun.serving.jobs import End, Event, Job
from forerun.serving.metrics import Metrics
from forerun.serving.routing import MethodControllers, MethodDispatcher, constrain
from forerun.serving.traces import Traces

log = logging.getLogger("forerun.serving")
MakeEngine = Callable[[Recorder], tuple[Engine, MethodDispatcher, MethodControllers]]
JobCallback = Callable[[Job], None]


class Batch:
    """The running sequences. on_choice_end, on_job_end: called when a choice or a job ends."""

    def __init__(
        self,
        make: MakeEngine,
        metrics: Metrics,
        on_choice_end: JobCallback,
        on_job_end: JobCallback,
    ) -> None:
        self._make, self.metrics = make, metrics
        self._on_choice_end, self._on_job_end = on_choice_end, on_job_end
        self._progress: dict[Job, Progress] = {}
        self._choices: dict[Sequence, Choice] = {}
        self._outbox: list[tuple[Job, Event]] = []
        self.durations: deque[float] = deque([1.0], maxlen=32)  # seconds, of recent requests
        self._build()

    @property
    def num_running(self) -> int:
        return len(self._choices)

    @property
    def num_free(self) -> int:
        """Number of sequences that may join."""
        return self.engine.scheduler.max_seqs - len(self._choices)

    @property
    def is_idle(self) -> bool:
        return not self._choices and self.engine.scheduler.is_idle

    def jobs(self) -> list[Job]:
        """The requests with running sequences."""
        return list(self._progress)

    def events(self) -> list[tuple[Job, Event]]:
        """The events since the last call."""
        events, self._outbox = self._outbox, []
        return events

    def begin(self, group: Group) -> None:
        """Adds the sequences of one prompt; on an error its request fails."""
        if group.job.is_over:  # another of its prompts failed in this step
            return
        try:
            self._join(group)
        except Exception as fault:
            if not isinstance(fault, ConfigError | CapacityError):
                log.exception("a request could not join the batch")
            self.fail(group.job, of_fault(fault))

    def _join(self, group: Group) -> None:
        job = group.job
        progress = self._progress.get(job)
        if progress is None:
            progress = self._progress[job] = Progress.of(job)
        choices = sequences(group, self.engine.target.context)
        is_own = job.is_seeded or progress.predicted is not None
        seqs = [choice.seq for choice in choices]
        # a seeded request must draft in the same way whatever else runs
        has_room = job.is_seeded or self._has_room(job.method, seqs)
        method = job.method if has_room else "none"
        self.controllers.assign(seqs, method, job.nodes, is_own, job.tenant)
        for choice in choices:
            seq = choice.seq
            self.dispatcher.assign(seq, method, progress.prediction())
            constrain(self.engine.shapers, seq, job.constraints)
            if job.traces:
                choice.trace = self.traces.start(seq, method)
            progress.choices[choice.number] = self._choices[seq] = choice
            self.engine.submit(seq)
        self.metrics.prompt_tokens.inc(group.num_tokens)

    def _has_room(self, method: str, seqs: list[Sequence]) -> bool:
        """Whether the memory of a drafting method fits in addition to the target's KV cache.

        If not, these sequences run without drafts; the next request is checked again.
        """
        target, longest = self.engine.target, max(seq.num_prompt + seq.limit for seq in seqs)
        try:
            taken = target.check_room(len(self._choices) + len(seqs), longest)
            self.dispatcher.by_name[method].check_room(len(seqs), longest, taken)
        except CapacityError as why:
            log.warning("no memory for drafts of %s, a request runs without: %s", method, why)
            return False
        return True

    def step(self) -> None:
        """One step of all sequences; its results are in `events`."""
        with self.engine.target.lock:
            self._step()

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as fault:
            self._isolate(fault)
        now = time.monotonic()
        for choice in list(self._choices.values()):
            if choice.job.is_over:  # another of its choices failed in this step
                continue
            try:
                self._report(choice, now)
            except Exception as fault:
                log.exception("the result of a request could not be reported")
                self.fail(choice.job, of_fault(fault))
        if self._finished_jobs:
            self._forget_finished()

    def drop(self, job: Job) -> None:
        """Ends the sequences of a request; their state is freed at the next step."""
        for choice in [c for c in self._choices.values() if c.job is job]:
            self.engine.cancel(choice.seq)
            self._remove(choice)
        self._finish_job(job)

    def fail(self, job: Job, error: ApiError) -> None:
        """Drops a request and sends it an error."""
        self._outbox.append((job, error))
        self.drop(job)

    def restart(self, fault: Exception, joining: Iterable[Job] = ()) -> None:
        """Fails all running and joining requests, and makes a new engine on the same target."""
        self.metrics.faults.inc()
        for seq in list(self._choices):
            with suppress(Exception):
                self.engine.target.release(seq)
        error = engine_fault(fault)  # without its text, which may name tokens of other tenants
        for job in dict.fromkeys([*self.jobs(), *joining]):
            if not job.is_over:
                self.fail(job, error)
        self._build()

    def _build(self) -> None:
        self.recorder, self.traces = Recorder(), Traces()
        self._finished_jobs: list[Job] = []  # their drafter state is dropped after the step
        self.engine, self.dispatcher, self.controllers = self._make(self.recorder)
        self.engine.listeners.append(self.traces)

    def _report(self, choice: Choice, now: float) -> None:
        """Sends the new text of one choice; removes it if it has ended."""
        job, seq = choice.job, choice.seq
        self._measure(choice, now)
        report = None if seq.finish is None else self._constraint_report(seq)
        if report is not None:
            self.metrics.constrained(report)
            if error := self._constraint_error(choice, report):
                self.fail(job, error)
                return
        piece = choice.next_piece(self.engine.stops) if job.streams or seq.finish else None
        if piece is not None:
            self._outbox.append((job, piece))
        if seq.finish is not None:
            self._progress[job].reports[choice.number] = report
            self._finish_choice(choice, self._progress[job])

    def _measure(self, choice: Choice, now: float) -> None:
        seq, new = choice.seq, choice.seq.num_generated - choice.num_seen
        if not new:
            return
        if not choice.num_seen:
            self.metrics.first_token.observe(now - choice.job.arrived)
            if seq.index == 0:  # the other samples of a prompt share its KV cells anyway
                self._count_reuse(choice)
        else:
            self.metrics.between.observe((now - choice.last) / new)
        choice.num_seen, choice.last = seq.num_generated, now

    def _count_reuse(self, choice: Choice) -> None:
        """Counts the prompt tokens found in the prefix cache."""
        found = self.engine.target.reused(choice.seq)
        self._progress[choice.job].count.cached += found
        self.metrics.cache_queries.inc(choice.seq.num_prompt)
        self.metrics.cache_hits.inc(found)

    def _finish_choice(self, choice: Choice, progress: Progress) -> None:
        """Counts and removes a finished choice; sends `End` if it was the last of its job."""
        job, seq, count = choice.job, choice.seq, progress.count
        self.metrics.finished(seq.finish or "")
        progress.num_ended += 1
        count.completion += len(seq.generated)
        self.recorder.of(seq).failures = failures = self.dispatcher.failures(seq)
        self.metrics.failures.inc(failures)
        prediction = self.dispatcher.prediction(seq)
        if prediction is not None:
            num_matched = prediction.num_matched(seq.generated)
            count.accepted_prediction += num_matched
            count.rejected_prediction += len(job.prediction) - num_matched
        self._remove(choice)
        if progress.is_done:
            order = [progress.choices[i].seq for i in range(job.num_choices)]
            stats = [self.recorder.of(seq) for seq in order]
            methods = [*map(self.dispatcher.method, order)]
            reports = [progress.reports.get(i) for i in range(job.num_choices)]
            self._outbox.append((job, End(count, stats, methods, reports)))
            seconds = time.monotonic() - job.arrived
            self.metrics.whole.observe(seconds)
            self.durations.append(seconds)
            self._finish_job(job)

    def _constraint_error(self, choice: Choice, report: Report) -> ApiError | None:
        """The error of a finished text that its constraint gave up, or left without a token."""
        job, seq = choice.job, choice.seq
        if report.error:
            return given_up(report.error, job.wanted and job.wanted.param)
        is_ended = (
            seq.finish == "stop" and seq.end is None and job.sampling.constraint_start is None
        )
        if report.valid or job.wanted is None or not is_ended:
            return None
        ends = self.engine.stops.eos_ids
        return no_token_left(job.wanted.param) if seq.tokens[-1] in ends else None

    def _constraint_report(self, seq: Sequence) -> Report | None:
        """What its constraint did to a finished sequence."""
        text = self.engine.stops.text(seq)
        reports = (shaper.report(seq, text) for shaper in seq.shapers)
        return next((found for found in reports if found is not None), None)

    def _isolate(self, fault: Exception) -> None:
        """Steps every sequence alone; drops only the jobs of sequences that fail."""
        self.metrics.faults.inc()
        log.error("a step failed; its sequences are tried one by one", exc_info=fault)
        running = [seq for seq in self.engine.scheduler.running if seq.finish is None]
        waiting = set(self.engine.scheduler.waiting)
        for seq, choice in list(self._choices.items()):
            if seq.finish is None and seq not in waiting and seq not in running:
                self.fail(choice.job, of_fault(fault))  # it failed while joining
        for seq in running:
            if seq not in self._choices:  # its job has failed already
                continue
            try:
                self.engine.round([seq])
            except Exception as own_fault:
                self.fail(self._choices[seq].job, of_fault(own_fault))
        self.engine.retire()

    def _remove(self, choice: Choice) -> None:
        self._choices.pop(choice.seq, None)
        self._on_choice_end(choice.job)

    def _finish_job(self, job: Job) -> None:
        """Marks a job as over: none of its sequences runs or joins any more."""
        job.is_over = True
        if self._progress.pop(job, None) is not None:
            self._finished_jobs.append(job)
        self._on_job_end(job)

    def _forget_finished(self) -> None:
        """Drops the drafter state of finished jobs, after their sequences were retired."""
        self.engine.retire()
        jobs, self._finished_jobs = self._finished_jobs, []
        for job in jobs:
            for i in range(len(job.prompts)):
                self.dispatcher.forget((job.number, i))
                if job.is_seeded:
                    self.dispatcher.forget(kept_key("tenant", job.memory_tenant(i)))
