"""Turns the events of a job into an HTTP answer: one JSON body, or server-sent events.

A disconnect of the client cancels its job. A request over its time limit gets an error.
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
CLIENT_CLOSED = 499  # status if the client disconnected; never sent


class Responder:
    """Submits jobs and turns their events into answers."""

    def __init__(self, worker: EngineThread, timeout: float, metrics: Metrics) -> None:
        self.worker, self.timeout, self.metrics = worker, timeout, metrics

    async def answer(self, request: Request, job: Job, reply: Reply) -> Response:
        """The answer to one request. Raises ApiError for errors before the first byte."""
        self.worker.submit(job)
        try:
            first = await self._unless_disconnected(request, self._next(job))
            if job.streams and not isinstance(first, ApiError):
                stream = self._stream(job, reply, first)
                return EventStream(stream, self._left(job), lambda: self._cancel(job))
            return Json(await self._unless_disconnected(request, self._whole(job, reply, first)))
        except ApiError as error:
            self._cancel(job, is_disconnect=error.status == CLIENT_CLOSED)
            raise
        except BaseException:  # the server shuts down
            self._cancel(job, is_disconnect=False)
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
        """Server-sent events, the last one [DONE]; an error is an event too."""
        try:
            for chunk in reply.opening():
                yield sse(chunk)
            while isinstance(event, Piece):
                for chunk in reply.more(event):
                    yield sse(chunk)
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

    async def _unless_disconnected(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises ApiError if the client disconnects first."""
        waiting = asyncio.ensure_future(work)
        disconnect = asyncio.ensure_future(_disconnect(request.receive))
        try:
            await asyncio.wait({waiting, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise ApiError(CLIENT_CLOSED, "the client disconnected")
        finally:
            waiting.cancel()
            disconnect.cancel()

    async def _next(self, job: Job) -> Event:
        """The next event of a job. Raises ApiError at the time limit."""
        try:
            async with asyncio.timeout(self._left(job)):
                return await job.mailbox.get()
        except TimeoutError:
            raise ApiError(
                504,
                f"the request was not finished within {self.timeout:g} s; ask for fewer tokens, "
                "or try again later",
                code="request_timeout",
            ) from None

    def _cancel(self, job: Job, is_disconnect: bool = True) -> None:
        """Cancels a job; safe if it has not started."""
        self.worker.cancel(job)
        self.metrics.cancelled.inc(is_disconnect)

    def _left(self, job: Job) -> float:
        return max(0.0, job.arrived + self.timeout - time.monotonic())


class EventStream(StreamingResponse):
    """A stream with a time limit, also if nothing is read; on_cut: called if it is cut."""

    media_type = "text/event-stream"

    def __init__(
        self, content: AsyncIterator[bytes], seconds: float, on_cut: Callable[[], None]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers)
        self._seconds = seconds + 5  # after the stream's own timeout event
        self._on_cut = on_cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streaming = asyncio.ensure_future(self.stream_response(send))
        disconnect = asyncio.ensure_future(_disconnect(receive))
        both = streaming, disconnect
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
    """One server-sent event in ASCII, as some readers split lines at Unicode line separators."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode("ascii")


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
