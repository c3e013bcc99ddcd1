"""From a job's events to an HTTP answer: whole, or as server-sent events.

Whoever goes away cancels his job; whoever waits too long is told so.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from forerun.serving.engine_thread import EngineThread
from forerun.serving.errors import ApiError, Json
from forerun.serving.jobs import Event, Job, Piece
from forerun.serving.metrics import Metrics
from forerun.serving.replies import Reply

T = TypeVar("T")
GONE = 499  # what a client that went away would have been told


class Answerer:
    """Submits jobs and turns what comes back into answers."""

    def __init__(self, worker: EngineThread, timeout: float, metrics: Metrics) -> None:
        self.worker, self.timeout, self.metrics = worker, timeout, metrics

    async def answer(self, request: Request, job: Job, reply: Reply) -> Response:
        """The answer to one request. Raises ApiError for what went wrong before the first byte."""
        self.worker.submit(job)
        try:
            first = await self._unless_gone(request, self._next(job))
            if job.streams and not isinstance(first, ApiError):
                stream = self._stream(job, reply, first)
                return EventStream(stream, self._left(job), lambda: self._drop(job))
            return Json(await self._unless_gone(request, self._whole(job, reply, first)))
        except ApiError as error:
            self._drop(job, is_gone=error.status == GONE)
            raise
        except BaseException:  # the server ends
            self._drop(job, is_gone=False)
            raise

    async def _whole(self, job: Job, reply: Reply, event: Event) -> dict[str, Any]:
        """The answer in one piece. Raises ApiError."""
        pieces = []
        while isinstance(event, Piece):
            pieces.append(event)
            event = await self._next(job)
        if isinstance(event, ApiError):
            raise event
        return reply.whole(pieces, event)

    async def _stream(self, job: Job, reply: Reply, event: Event) -> AsyncIterator[bytes]:
        """Server-sent events, the last one [DONE]; an error is an event of its own."""
        try:
            for chunk in reply.opening():
                yield sse(chunk)
            while isinstance(event, Piece):
                yield sse(reply.more(event))
                event = await self._next(job)
            if isinstance(event, ApiError):
                raise event
            for chunk in reply.closing(event):
                yield sse(chunk)
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            self.worker.cancel(job)
            self.metrics.failed(error.status)
            yield sse(error.body())

    async def _unless_gone(self, request: Request, coming: Coroutine[Any, Any, T]) -> T:
        """What comes, unless the client goes away first. Raises ApiError."""
        waiting = asyncio.ensure_future(coming)
        leaving = asyncio.ensure_future(_disconnect(request.receive))
        try:
            await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise ApiError(GONE, "the client went away")
        finally:
            waiting.cancel()
            leaving.cancel()

    async def _next(self, job: Job) -> Event:
        """The next event of a job. Raises ApiError if time is up first."""
        try:
            async with asyncio.timeout(self._left(job)):
                return await job.mailbox.get()
        except TimeoutError:
            raise ApiError(
                504,
                f"the request was not finished within {self.timeout:g} s; ask for fewer tokens, "
                "or try again when the server is less busy",
                code="request_timeout",
            ) from None

    def _drop(self, job: Job, is_gone: bool = True) -> None:
        """Nobody waits for a job any more, if it runs at all."""
        self.worker.cancel(job)
        self.metrics.cancelled.inc(is_gone)

    def _left(self, job: Job) -> float:
        return max(0.0, job.arrived + self.timeout - time.monotonic())


class EventStream(StreamingResponse):
    """A stream that ends in time even if nobody reads it; `on_cut` hears that it was not read."""

    media_type = "text/event-stream"

    def __init__(
        self, content: AsyncIterator[bytes], seconds: float, on_cut: Callable[[], None]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers)
        self._seconds = seconds + 5  # the stream itself says it first, if it is heard
        self._on_cut = on_cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streaming = asyncio.ensure_future(self.stream_response(send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        both = streaming, leaving
        try:
            await asyncio.wait(both, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
        finally:
            if not streaming.done() or streaming.exception():
                self._on_cut()
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event; ASCII, so that no reader breaks a line within it."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode("ascii")


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
