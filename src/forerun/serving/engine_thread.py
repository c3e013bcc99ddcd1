"""The engine thread: requests join and leave between steps, events go to the event loop.

One lock guards the state shared with other threads: the queue, cancellations, and shutdown. The
batch handles errors of single requests. Any other error fails all running requests, and the thread
continues with a new engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress

from forerun.core.roles import Drafter
from forerun.serving.admission import Admission, Group
from forerun.serving.batch import Batch, MakeEngine
from forerun.serving.errors import ApiError, shutting_down
from forerun.serving.jobs import Event, Job
from forerun.serving.metrics import Metrics

log = logging.getLogger("forerun.serving")
MAX_FAULTS = 3  # failed steps in a row until /health reports "failing"
MAX_PREFILL_TOKENS = 2048  # prompt tokens that join in one step, to bound the latency of others


class EngineThread:
    """Runs one engine in its own thread."""

    def __init__(self, make: MakeEngine, metrics: Metrics, max_waiting: int) -> None:
        self._lock = threading.Condition()
        self._batch = Batch(make, metrics, self._on_choice_end, self._on_job_end)
        self._admission = Admission(max_waiting, self._batch.engine.scheduler.max_seqs)
        self._cancelled: set[Job] = set()
        self._open: set[Job] = set()  # accepted and not ended
        self._abort_error: ApiError | None = None  # if set, all requests end with it
        self._is_closing = self._has_died = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._last_step = time.monotonic()
        self._num_faults = 0  # in a row

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; events are delivered on `loop`."""
        self._loop = loop
        self._thread.start()

    def check_open(self) -> None:
        """Raises ApiError 503 if no request is accepted."""
        if self._is_closing:
            raise self._closed_error()

    def submit(self, job: Job) -> None:
        """Queues a request. Raises ApiError 429, or 503 while shutting down or after a crash."""
        with self._lock:
            if self._is_closing or not self._thread.is_alive():
                raise self._closed_error()
            self._admission.add(job, self._expected_wait())
            self._open.add(job)
            self._lock.notify()

    def cancel(self, job: Job) -> None:
        """Cancels a request; its state is freed at the next step."""
        with self._lock:
            self._cancelled.add(job)
            self._lock.notify()

    def close(self) -> None:
        """Accepts no more requests; accepted ones continue."""
        with self._lock:
            self._is_closing = True
            self._lock.notify()

    def abort(self) -> None:
        """Ends all remaining requests with an error."""
        with self._lock:
            self._is_closing, self._abort_error = True, shutting_down()
            self._lock.notify()

    def join(self, seconds: float) -> None:
        """Waits for the thread to end, after `close` or `abort`."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def drafter(self) -> Drafter:
        """The drafter of the current engine."""
        return self._batch.dispatcher

    @property
    def num_running(self) -> int:
        return self._batch.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._admission)

    def state(self, stall: float) -> str:
        """ok, shutting down, stopped, failing, or stalled: busy, no step for `stall` seconds."""
        if self._has_died or not self._thread.is_alive():
            return "stopped"
        if self._is_closing:
            return "shutting down"
        if self._num_faults >= MAX_FAULTS:
            return "failing"
        is_late = self.num_running and time.monotonic() - self._last_step > stall
        return "stalled" if is_late else "ok"

    def _expected_wait(self) -> float:
        """Estimated seconds until a new request is admitted, from recent durations."""
        durations = self._batch.durations
        waves = 1 + self._admission.num_sequences / self._batch.engine.scheduler.max_seqs
        return waves * sum(durations) / len(durations)

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except BaseException:
            self._has_died = True
            log.critical("the engine thread has died", exc_info=True)
            raise
        finally:
            with self._lock:
                self._is_closing = True
                left = list(self._open)
            self._deliver([(job, self._closed_error()) for job in left])

    def _run_once(self) -> bool:
        """Waits for work and does one step; returns False at shutdown."""
        try:
            groups = self._next()
            if groups is None:
                return False
            for group in groups:
                self._batch.begin(group)
            is_busy = self._batch.num_running > 0
            self._batch.step()
            if is_busy:
                self._num_faults = 0
        except Exception as fault:
            self._restart(fault)
        self._deliver(self._batch.events())
        self._last_step = time.monotonic()
        return True

    def _restart(self, fault: Exception) -> None:
        """Replaces the engine and fails running requests; waiting ones too after the first fault.

        Raises the fault if it repeats without any request.
        """
        log.error("the engine failed and is restarted", exc_info=fault)
        with self._lock:
            self._num_faults += 1
            if not self._open and self._num_faults >= MAX_FAULTS:
                raise fault
            waiting = set(self._admission.jobs()) if self._num_faults == 1 else set[Job]()
            lost = self._open - waiting
        self._batch.restart(fault, lost)  # slow, so without the lock

    def _next(self) -> list[Group] | None:
        """Waits for work; returns the groups that join, or None at shutdown."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_closing or self._has_work())
            if not self._has_work():
                return None
            if self._abort_error is not None:
                for job in list(self._open):
                    self._batch.fail(job, self._abort_error)
            for job in self._cancelled:
                self._batch.drop(job)
            self._cancelled.clear()
            if self._batch.is_idle:
                self._last_step = time.monotonic()
            if not len(self._admission):
                return []
            return self._admission.take(self._batch.num_free, MAX_PREFILL_TOKENS)

    def _closed_error(self) -> ApiError:
        """The error for requests that are not accepted any more."""
        return _crashed() if self._has_died else shutting_down()

    def _has_work(self) -> bool:
        return bool(len(self._admission) or self._cancelled or not self._batch.is_idle)

    def _on_choice_end(self, job: Job) -> None:
        with self._lock:
            self._admission.release(job)

    def _on_job_end(self, job: Job) -> None:
        with self._lock:
            self._open.discard(job)
            self._admission.drop(job)

    def _deliver(self, events: list[tuple[Job, Event]]) -> None:
        """Passes all events of a step to the event loop at once."""
        if events and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_put, events)


def _put(events: list[tuple[Job, Event]]) -> None:
    for job, event in events:
        job.mailbox.put_nowait(event)


def _crashed() -> ApiError:
    text = "the engine has stopped after an internal error; restart the server"
    return ApiError(503, text, code="engine_fault", retry_after=60)
