"""Limits of every request: the size of its body and the time it takes to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serving.errors import ApiError

MAX_HELD_BODIES = 8  # bodies of max_body bytes that are read and tokenised at once
SMALL_BODY_BYTES = 1 << 16  # a body up to this is not counted
SHARE = "forerun.share"  # of the scope
MAX_DROPPED = 4  # times max_body: how much of a too large body is read and dropped


class HeldBytes:
    """The bytes of all large bodies in memory, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0

    def share(self) -> Share:
        """The share of one request."""
        return Share(self)


class Share:
    """The bytes that one request holds."""

    def __init__(self, held: HeldBytes) -> None:
        self._held, self._size = held, 0

    def resize(self, size: int) -> None:
        """Sets the number of bytes. Raises ApiError 503 beyond the limit."""
        size = size if size > SMALL_BODY_BYTES else 0
        if self._held.total - self._size + size > self._held.limit:
            raise ApiError(
                503,
                f"large requests in memory would exceed {self._held.limit} bytes in total; try "
                "again, or send smaller ones",
                code="overloaded",
                retry_after=1,
            )
        self._held.total += size - self._size
        self._size = size

    def release(self) -> None:
        """Ends the share; safe to repeat."""
        self._held.total -= self._size
        self._size = 0


def forget_body(request: Request) -> None:
    """Drops the body of a request after it was tokenised."""
    request._body = b""
    if isinstance(share := request.scope.get(SHARE), Share):
        share.release()


class Limits:
    """ASGI middleware: reads the whole body first, within a size and a time.

    A too large body is answered at once, and the rest of it is read and dropped, because many
    clients read the answer only after they sent everything. on_error: receives the status of a
    rejected request.
    """

    def __init__(
        self, app: ASGIApp, max_body: int, seconds: float, on_error: Callable[[int], None]
    ) -> None:
        self.app, self.max_body, self.seconds = app, max_body, seconds
        self._on_error = on_error
        self._held = HeldBytes(MAX_HELD_BODIES * max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        share = self._held.share()
        try:
            await self._answer({**scope, SHARE: share}, receive, send, share)
        finally:
            share.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, share: Share) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._body(scope, receive, share)
        except TimeoutError:
            error = ApiError(408, f"the request did not arrive within {self.seconds:g} s")
            await self._refuse(error, scope, receive, send)
            return
        except ApiError as error:
            await self._refuse(error, scope, receive, _without_end(send))
            await self._drain(scope, receive)
            await send({"type": "http.response.body"})
            return
        if body is not None:
            await self.app(scope, _replay(body, receive), send)

    async def _body(self, scope: Scope, receive: Receive, share: Share) -> bytes | None:
        """The body; None if the client disconnected. Raises ApiError 413, or 503 if there are too
        many large bodies.
        """
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                self._check(int(value))
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            self._check(len(body))
            share.resize(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    def _check(self, size: int) -> None:
        if size > self.max_body:
            raise ApiError(
                413,
                f"the request has at least {size} bytes, but the limit is {self.max_body}",
                code="request_too_large",
            )

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._on_error(error.status)
        response = error.response()
        response.headers["Connection"] = "close"  # the rest of the body is not read
        await response(scope, receive, send)

    async def _drain(self, scope: Scope, receive: Receive) -> None:
        """Reads and drops the rest of a body, up to a limit."""
        if any(name == b"expect" for name, _ in scope["headers"]):  # it waits for 100 Continue
            return
        left = MAX_DROPPED * self.max_body
        with suppress(TimeoutError):
            async with asyncio.timeout(self.seconds):
                while left > 0 and (message := await receive()).get("more_body", False):
                    left -= len(message["body"])


def _without_end(send: Send) -> Send:
    """Sends an answer without its end, so that the connection stays open."""

    async def send_open(message: Any) -> None:
        is_body = message["type"] == "http.response.body"
        await send(message | {"more_body": True} if is_body else message)

    return send_open


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that yields the body, then the messages after it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return first.pop() if first else await receive()

    return again
