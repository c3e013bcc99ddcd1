"""Learning while serving: a thread that updates drafts within a share of time.

The learner works in slices: the gradient of one text, the acceptance of one held-out text, the
optimizer's step, one publication, or a reset. It pauses before each slice. The engine's thread
records the steps of requests. While requests run, both together take at most `share` of the time
that passes, plus one slice and the recording of one step. Recording alone takes at most half of
`share`: beyond that, steps are not recorded. Two costs are not limited: requests that are being
recorded are stored when they end (counted, and paid back later), and a step that is not recorded
costs a few microseconds (not counted).

While no request runs, the learner works without a limit: a request that arrives waits for nothing,
it shares the processor with one slice at most. The thread has the usual priority: with a lower one
it could be suspended while it holds the interpreter's lock, and the engine would wait. An error
ends the learning, never a request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from forerun.core.records import Step
from forerun.core.roles import Drafter
from forerun.drafters.online import Online, online_parts
from forerun.errors import ConfigError
from forerun.serving.metrics import Metrics
from forerun.training.online.corrections import RequestStats
from forerun.training.online.learner import OnlineLearner, OnlineOptions, draft_module
from forerun.training.online.translated import objective_for

log = logging.getLogger("forerun.serving")
RECORDING_PART = 0.5  # of the share; the other half is left for slices
IDLE_SECONDS = 0.2  # between two looks for work
WARN_AFTER_REQUESTS = 8  # finished, and none recorded


class TimeShare:
    """Seconds that may be spent while requests run: `share` of the time that passes. Thread-safe.

    Nothing is saved up. So if work begins only without debt, in any interval of t seconds at most
    share * t seconds and one piece of work are spent. All times are arguments.
    """

    def __init__(self, share: float, now: float) -> None:
        self.share, self._debt, self._last = share, 0.0, now
        self._lock = threading.Lock()

    def debt(self, now: float) -> float:
        """Seconds spent ahead of the share."""
        return self._add(0.0, now)

    def spend(self, seconds: float, now: float) -> None:
        """Counts seconds of work."""
        self._add(seconds, now)

    def _add(self, seconds: float, now: float) -> float:
        with self._lock:
            passed = max(0.0, now - self._last)
            self._debt = max(0.0, self._debt - self.share * passed) + seconds
            self._last += passed
            return self._debt

    def wait(self, now: float) -> float:
        """Seconds until work may go on."""
        return self.debt(now) / self.share

    def set_share(self, share: float, now: float) -> None:
        """Changes the share; the debt stays."""
        self.debt(now)
        self.share = share


class Learning:
    """The learner of a server: a listener of its engine, a thread, and an operator's switch.

    num_running: number of running requests. Raises ConfigError if the draft cannot be trained.
    """

    def __init__(
        self,
        drafter: Online,
        share: float,
        options: OnlineOptions,
        metrics: Metrics,
        num_running: Callable[[], int],
    ) -> None:
        self.drafter, self.options, self.num_running = drafter, options, num_running
        self.learner = OnlineLearner(
            draft_module(str(drafter.model)),
            options,
            lambda seq: self.drafter.class_of(seq),
            self._note,
            # of the current drafter: the one of an engine that failed is not kept alive
            objective_for(drafter, options, lambda: self.drafter.translation),
        )
        now = monotonic()
        self.time = TimeShare(share, now)  # of slices and recording
        self.recording = TimeShare(share * RECORDING_PART, now)
        self.is_on, self.error = True, ""
        self.seconds = 0.0  # of all work
        self.num_requests = 0  # finished while learning was on
        self._has_warned = False
        self._unpublished: set[str] = set()  # classes with weights that wait for a free copy
        self._unpublished_resets: set[str] = set()  # of them: without the reset
        self._wants_reset = self._is_closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="forerun-learner", daemon=True)
        self._metrics(metrics)

    def attach(self, drafter: Drafter) -> None:
        """Takes the drafter of a new engine, after the first one or a fault."""
        found = online_parts(drafter)[0]
        if found is not self.drafter:
            self.drafter = found
            self._unpublished |= set(self.learner.learners)

    def warm_up(self) -> None:
        """Computes a gradient once, so that the first slice is no longer than others."""
        for kind in self.drafter.router.classes:
            self.learner.learner(kind)
        self.learner.warm_up()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after its current slice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def join(self, seconds: float) -> None:
        """Waits for the thread to end."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def set(
        self, *, enabled: bool | None = None, share: float | None = None, reset: bool = False
    ) -> None:
        """Switches learning on or off, changes the share, or returns to the initial weights.

        The thread does a reset later. Raises ConfigError for a reset after an error ended it.
        """
        if reset and self.error:
            raise ConfigError(
                f"learning has stopped ({self.error}); restart the server to reset it"
            )
        with self._wake:
            if share is not None:
                now = monotonic()
                self.time.set_share(share, now)
                self.recording.set_share(share * RECORDING_PART, now)
            if enabled is not None:
                self.is_on = enabled
            if reset:
                self._wants_reset = True
            self._wake.notify()

    def observe(self, step: Step) -> None:
        """Records the step if the share allows it. Called by the engine's thread; never raises.

        The step's content has no influence on whether it is recorded.
        """
        if not self.is_on or self.error:
            return
        start = monotonic()
        may_record = self.recording.debt(start) <= 0
        num_finished = sum(seq.finish is not None for seq in step.seqs)
        if not may_record and not num_finished:
            return
        self.num_requests += num_finished
        try:
            self.learner.observe(step, may_record)
        except Exception as error:
            self._fail(error)
        if num_finished and not self._has_warned:
            self._warn_if_starved()
        now = monotonic()
        self.seconds += now - start
        self.time.spend(now - start, now)
        self.recording.spend(now - start, now)

    def describe(self) -> dict[str, Any]:
        """The state, for the operator."""
        learners, buffers = self.learner.learners, self.learner.buffers
        classes = {
            kind: {
                "version": version,
                "updates": learners[kind].num_updates if kind in learners else 0,
                "fallbacks": learners[kind].num_fallbacks if kind in learners else 0,
                "buffered_tokens": buffers[kind].num_tokens if kind in buffers else 0,
            }
            for kind, version in self.drafter.versions().items()
        }
        return {
            "enabled": self.is_on and not self.error,
            "share": self.time.share,
            "error": self.error or None,
            "seconds": self.seconds,
            "requests_seen": self.num_requests,
            "requests_recorded": self.learner.num_recorded,
            "reset_pending": self._is_reset_pending,
            "classes": classes,
        }

    @property
    def _is_reset_pending(self) -> bool:
        """Whether new requests do not get the initial weights yet, after an operator's reset."""
        return not self.error and (self._wants_reset or bool(self._unpublished_resets))

    def _warn_if_starved(self) -> None:
        """Warns once if none of the first requests had anything to record."""
        if self.num_requests < WARN_AFTER_REQUESTS or self.learner.num_recorded or self.error:
            return
        self._has_warned = True
        log.warning(
            "learning has recorded nothing yet: 0 of %d finished requests; send requests without a "
            "seed to the method that learns, with prompts of at most %d tokens (drafts that are "
            "always accepted give nothing to record)",
            self.num_requests,
            self.learner.listen.max_length,
        )

    def _note(self, kind: str, stats: RequestStats) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                slices = self._work()
                while self._pause() and self._next(slices):
                    pass
                if self._unpublished:
                    self._sleep(IDLE_SECONDS)
        except Exception as error:
            self._fail(error)

    def _wait_for_work(self) -> bool:
        """Waits until a class is due; False at the end."""
        with self._wake:
            while not self._is_closing:
                if self._wants_reset or self._unpublished:
                    return True
                if self.is_on and self.learner.due() is not None:
                    return True
                self._wake.wait()
        return False

    def _work(self) -> Iterator[None]:
        """A reset, one update, and the publications that wait, in slices."""
        if self._wants_reset:
            self._unpublished |= set(self.learner.learners)
            self._unpublished_resets |= set(self.learner.learners)
            with self._wake:
                self._wants_reset = False
            self.learner.reset()
            yield
        kind = self.learner.due() if self.is_on else None
        if kind is not None:
            before = self.learner.version(kind)
            yield from self.learner.slices(kind)
            if self.learner.version(kind) > before:
                self._unpublished.add(kind)
            yield
        for kind in sorted(self._unpublished):
            if self._publish(kind):
                self._unpublished.discard(kind)
                self._unpublished_resets.discard(kind)
            yield

    def _publish(self, kind: str) -> bool:
        state = self.learner.learner(kind).state()
        return self.drafter.publish(kind, state, self.learner.version(kind))

    def _next(self, slices: Iterator[None]) -> bool:
        """Runs one slice; its time counts while requests run. False: there was none left."""
        start, was_busy = monotonic(), self.num_running() > 0
        is_last = next(slices, slices) is slices
        now = monotonic()
        self.seconds += now - start
        if was_busy or self.num_running() > 0:
            self.time.spend(now - start, now)
        return not is_last

    def _pause(self) -> bool:
        """Waits until the share allows another slice, or no request runs; False at the end."""
        while not self._is_closing and self.num_running() > 0:
            seconds = self.time.wait(monotonic())
            if seconds <= 0:
                break
            self._sleep(min(seconds, IDLE_SECONDS))
        return not self._is_closing

    def _sleep(self, seconds: float) -> None:
        with self._wake:
            if not self._is_closing:
                self._wake.wait(seconds)

    def _fail(self, error: Exception) -> None:
        """Ends the learning; requests go on with the weights of the last version."""
        if not self.error:
            self.error = f"{type(error).__name__}: {error}"
            log.error("learning has stopped (%s); requests go on", self.error, exc_info=error)

    def _metrics(self, metrics: Metrics) -> None:
        learners = self.learner.learners

        def fallbacks() -> int:
            return sum(one.num_fallbacks for one in list(learners.values()))

        def tokens() -> int:
            return sum(buffer.num_tokens for buffer in list(self.learner.buffers.values()))

        rows: dict[str, tuple[str, Callable[[], float]]] = {
            "learner_enabled": (
                "1 while the draft learns",
                lambda: float(self.is_on and not self.error),
            ),
            "learner_failed": ("1 after an error ended it", lambda: float(bool(self.error))),
            "learner_seconds": ("Time spent on learning", lambda: self.seconds),
            "learner_fallbacks": ("Updates replaced by the average", fallbacks),
            "learner_buffered_tokens": ("Tokens of recorded requests", tokens),
            "learner_requests_seen": (
                "Requests that finished while learning was on",
                lambda: self.num_requests,
            ),
            "learner_requests_recorded": (
                "Finished requests with a recorded position",
                lambda: self.learner.num_recorded,
            ),
        }
        for name, (text, value) in rows.items():
            metrics.gauge(name, text, value, "forerun")
        versions = {
            kind: lambda kind=kind: float(self.drafter.versions()[kind])  # type: ignore[misc]
            for kind in self.drafter.router.classes
        }
        text = "Version of the draft that new requests get"
        metrics.gauges("draft_version", text, "class", versions, "forerun")
