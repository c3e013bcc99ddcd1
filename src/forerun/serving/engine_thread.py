"""The engine's thread: requests join and leave between steps, events go back to the event loop.

One lock guards what other threads may touch: the queue, cancellations, and whether to go on. A
fault of one request is the batch's business; any other costs what runs, and the thread goes on
with a new engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress

from forerun.serving.admission import Admission, Group
from forerun.serving.batch import Batch, Make
from forerun.serving.errors import ApiError
from forerun.serving.jobs import Event, Job
from forerun.serving.metrics import Metrics

log = logging.getLogger("forerun.serving")
MOST_FAULTS = 3  # in a row, without a good step between them, after which /health says so
PREFILL = 2048  # prompt tokens that may join in one step, so that a crowd does not halt the others


class EngineThread:
    """Runs one engine in a thread of its own."""

    def __init__(self, make: Make, metrics: Metrics, max_waiting: int) -> None:
        self._lock = threading.Condition()
        self._batch = Batch(make, metrics, self._left, self._gone)
        self._admission = Admission(max_waiting, self._batch.engine.scheduler.max_seqs)
        self._cancelled: set[Job] = set()
        self._open: set[Job] = set()  # of which somebody still waits for the end
        self._ending: ApiError | None = None  # set: everything ends with this error
        self._is_closing = self._has_died = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._beat = time.monotonic()  # of the last step
        self._num_faults = 0  # in a row

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; events are delivered on `loop`."""
        self._loop = loop
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a request. Raises ApiError 429, or 503 while shutting down or after a crash."""
        with self._lock:
            if self._is_closing or not self._thread.is_alive():
                raise self._over()
            self._admission.add(job, self._wait())
            self._open.add(job)
            self._lock.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for this request any more; its state is freed at the next step."""
        with self._lock:
            self._cancelled.add(job)
            self._lock.notify()

    def close(self) -> None:
        """Accepts nothing more; what has been accepted goes on."""
        with self._lock:
            self._is_closing = True
            self._lock.notify()

    def end(self) -> None:
        """Ends whatever is left with an error."""
        with self._lock:
            self._is_closing, self._ending = True, _closing()
            self._lock.notify()

    def join(self, seconds: float) -> None:
        """Waits for the thread to end, after `close` or `end`."""
        if self._thread.is_alive():
            self._thread.join(seconds)

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
        if self._num_faults >= MOST_FAULTS:
            return "failing"
        is_late = self.num_running and time.monotonic() - self._beat > stall
        return "stalled" if is_late else "ok"

    def _wait(self) -> float:
        """Seconds until a newcomer may be admitted, by what requests took of late."""
        lasted = self._batch.lasted
        waves = 1 + self._admission.num_sequences / self._batch.engine.scheduler.max_seqs
        return waves * sum(lasted) / len(lasted)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException:
            self._has_died = True
            log.critical("the engine's thread has died", exc_info=True)
            raise
        finally:
            with self._lock:
                self._is_closing = True
                left = list(self._open)
            self._deliver([(job, self._over()) for job in left])

    def _turn(self) -> bool:
        """Waits for something to do and does a step of it; False: it is all over."""
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
            self._mend(fault)
        self._deliver(self._batch.events())
        self._beat = time.monotonic()
        return True

    def _mend(self, fault: Exception) -> None:
        """A new engine; what ran or joined is told. What waits is served, if this is the first try.

        Raises the fault where it comes again and again with nothing under way.
        """
        log.error("the engine failed and is made anew", exc_info=fault)
        with self._lock:
            self._num_faults += 1
            if not self._open and self._num_faults >= MOST_FAULTS:
                raise fault
            waiting = set(self._admission.jobs()) if self._num_faults == 1 else set[Job]()
            lost = self._open - waiting
        self._batch.start_anew(fault, lost)  # takes a while, in which others may be queued

    def _next(self) -> list[Group] | None:
        """Waits for something to do; the groups that join, or None: it is all over."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_closing or self._has_work())
            if not self._has_work():
                return None
            if self._ending is not None:
                for job in list(self._open):
                    self._batch.fail(job, self._ending)
            for job in self._cancelled:
                self._batch.drop(job)
            self._cancelled.clear()
            if self._batch.is_idle:
                self._beat = time.monotonic()
            if not len(self._admission):
                return []
            return self._admission.take(self._batch.num_free, PREFILL)

    def _over(self) -> ApiError:
        """Why nothing is accepted any more."""
        return _crashed() if self._has_died else _closing()

    def _has_work(self) -> bool:
        return bool(len(self._admission) or self._cancelled or not self._batch.is_idle)

    def _left(self, job: Job) -> None:
        with self._lock:
            self._admission.left(job)

    def _gone(self, job: Job) -> None:
        with self._lock:
            self._open.discard(job)
            self._admission.drop(job)

    def _deliver(self, events: list[tuple[Job, Event]]) -> None:
        """Hands all events of a step over at once."""
        if events and self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                self._loop.call_soon_threadsafe(_put, events)


def _put(events: list[tuple[Job, Event]]) -> None:
    for job, event in events:
        job.mailbox.put_nowait(event)


def _closing() -> ApiError:
    text = "the server is shutting down; send the request elsewhere, or again in a while"
    return ApiError(503, text, code="shutting_down", retry_after=10)


def _crashed() -> ApiError:
    text = "the engine has stopped after an internal error; the server must be started again"
    return ApiError(503, text, code="engine_fault", retry_after=60)
