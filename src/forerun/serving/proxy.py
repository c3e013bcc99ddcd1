"""Several engines behind one port: an ASGI application that hands requests to servers like ours.

A request goes where its beginning has been before, as long as that server is not much busier than
the others: there its prefix is in the cache, and its tenant's texts have been learned from. A
server that goes away costs the streams that it had begun an error event; what had not begun is sent
to another one, as is what a server is too full for or failed at. All else (keys, queues,
parameters) is each server's own business.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

import h11
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.serving.errors import ApiError, Json, bad
from forerun.serving.limits import Limits
from forerun.serving.metrics import CONTENT_TYPE
from forerun.serving.settings import Settings
from forerun.serving.streams import sse
from forerun.serving.upstream import LOST, Headers, Reply, Upstream, exchange, fetch

log = logging.getLogger("forerun.serving")
SLACK = 4  # requests that a server may have more than the least busy one, to keep a conversation
HEAD = 512  # characters of a prompt or first message that tell conversations apart
TRIES = 2  # servers that may die or fail over one request
ELSEWHERE = (429, 503)  # one is full, or cannot go on: another one may answer


class Backend(Protocol):
    """Who keeps the servers alive."""

    up: dict[int, Upstream]  # those that take requests, by number

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def end(self) -> None:
        """Makes the servers end what they are at with an error."""


class Front:
    """The application; its lifespan starts and stops the backend. `close`, `end`: as it drains."""

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self.backend, self._is_closing = backend, False
        self._longest = settings.request_timeout + 10  # a server says it first, if it is heard
        self._registry = CollectorRegistry(auto_describe=False)
        made: dict[str, Any] = {"registry": self._registry}
        up = Gauge("forerun:replicas_up", "Engines that take requests", **made)
        up.set_function(lambda: len(self._alive()))
        self._retried = Counter("forerun:requests_retried", "Sent to another engine", **made)
        self._cut = Counter("forerun:streams_cut", "Streams whose engine went away", **made)
        text = "Requests answered with an error, by status"  # here: those that no engine answered
        self._errors = Counter("forerun:request_errors", text, ["status"], **made)
        limits = settings.max_body, settings.body_timeout
        self._limited = Limits(self._answer, *limits, self._failed)

    def close(self) -> None:
        """Accepts nothing more; what has been accepted goes on."""
        self._is_closing = True

    def end(self) -> None:
        """Ends whatever is left with an error."""
        self._is_closing = True
        self.backend.end()

    def _failed(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._limited(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.backend.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.backend.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; `receive` gives its body whole, then tells when the client goes away."""
        body, sent = (await receive()).get("body", b""), list[str]()

        async def tell(message: Any) -> None:
            sent.append(message["type"])
            await send(message)

        pages = {"/health": self._health, "/metrics": self._metrics}
        page = pages.get(scope["path"]) if scope["method"] == "GET" else None
        work: Any = self._page(page, scope, receive, tell) if page else None
        work = work or self._relay(scope, body, receive, tell)
        relaying, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
        both = relaying, leaving
        try:
            await asyncio.wait(both, timeout=self._longest, return_when=asyncio.FIRST_COMPLETED)
            is_late = not (relaying.done() or leaving.done())
            if relaying.done():
                relaying.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        if is_late:
            self._failed(504)
        if is_late and not sent:
            await _late(self._longest).response()(scope, receive, tell)
        elif is_late:
            last = b"\n\n" + sse(_late(self._longest).body())
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _page(self, page: Any, scope: Scope, receive: Receive, send: Send) -> None:
        await (await page())(scope, receive, send)

    async def _relay(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Sends a request to one server after the other until one answers it."""
        headers: Headers = list(scope["headers"])
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        key, tried, failed, is_lost = _key(headers, body), set[int](), 0, False
        told: ASGIApp | None = None
        full: ASGIApp | None = None  # what one that is full said: when to come again
        while not self._is_closing and (upstream := self._pick(key, tried)) is not None:
            tried.add(upstream.number)
            self._retried.inc(failed > 0)
            try:
                async with exchange(upstream, scope["method"], target, headers, body) as reply:
                    if reply.streams:
                        await self._stream(upstream, reply, send)
                        return
                    whole = await reply.body()
            except h11.LocalProtocolError as wrong:
                found = bad(f"this request cannot be passed on: {wrong}").response()
                self._failed(400)
                await found(scope, receive, send)
                return
            except LOST:
                upstream.is_lost, failed, told, is_lost = True, failed + 1, None, True
            else:
                is_lost = False
                told, failed = _whole(reply, whole), failed + (reply.status == 503)
                if reply.status not in ELSEWHERE:
                    full = None
                    break
                full = full or (told if reply.status == 429 else None)
            if failed == TRIES:
                full = None  # who comes again would end two more engines
                break
        answer = full or told
        if answer is None:
            error = _closing() if self._is_closing else _none(is_lost)
            self._failed(error.status)
            answer = error.response()
        await answer(scope, receive, send)

    async def _stream(self, upstream: Upstream, reply: Reply, send: Send) -> None:
        """Passes pieces on; if the server goes away the stream ends with an error event."""
        head: dict[str, Any] = {"type": "http.response.start", "status": reply.status}
        chunk: dict[str, Any] = {"type": "http.response.body", "more_body": True}
        pieces, last = aiter(reply.chunks), b""
        with suppress(OSError):  # of the client, who may go away
            await send(head | {"headers": reply.headers})
            while True:
                try:
                    piece = await anext(pieces, None)
                except LOST:
                    upstream.is_lost, last = True, b"\n\n" + sse(_none(True).body())
                    self._cut.inc()
                    log.warning("engine %d went away in the middle of a stream", upstream.number)
                    break
                if piece is None:
                    break
                await send(chunk | {"body": piece})
            await send(chunk | {"body": last, "more_body": False})

    def _alive(self) -> list[Upstream]:
        return [one for one in self.backend.up.values() if not one.is_lost]

    def _pick(self, key: bytes, tried: Iterable[int]) -> Upstream | None:
        """The server that this key belongs to, unless it is much busier than the least busy one."""
        free = [one for one in self._alive() if one.number not in set(tried)]
        if not free:
            return None
        most = min(one.in_flight for one in free) + SLACK
        near = [one for one in free if one.in_flight <= most]
        return max(near, key=lambda one: hashlib.sha256(b"%d " % one.number + key).digest())

    async def _health(self) -> Response:
        """200 while one server takes requests; counts of all, and which are there."""
        pages = await self._pages("/health")
        found = {
            number: json.loads(page)
            for number, (status, page) in sorted(pages.items())
            if status in (200, 503) and page.startswith(b"{")
        }
        is_up = any(status == 200 for status, _ in pages.values()) and not self._is_closing
        state = "shutting down" if self._is_closing else "ok" if is_up else "no engine is up"
        sums = {name: sum(one[name] for one in found.values()) for name in ("running", "waiting")}
        engines = {str(number): one["status"] for number, one in found.items()}
        return Json({"status": state, **sums, "engines": engines}, 200 if is_up else 503)

    async def _metrics(self) -> Response:
        """The pages of all servers as one: series differ in the label `engine`."""
        pages = await self._pages("/metrics")
        texts = [page.decode() for _, (status, page) in sorted(pages.items()) if status == 200]
        own = generate_latest(self._registry).decode()
        return Response(merged([own, *texts]), media_type=CONTENT_TYPE)

    async def _pages(self, path: str) -> dict[int, tuple[int, bytes]]:
        """A page of every server that gives it."""
        found: dict[int, tuple[int, bytes]] = {}

        async def one(upstream: Upstream) -> None:
            with suppress(*LOST):
                found[upstream.number] = await fetch(upstream, path)

        await asyncio.gather(*map(one, self._alive()))
        return found


def merged(pages: Iterable[str]) -> str:
    """Pages in Prometheus' form as one: every family once, with the series of all."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for page in pages:
        heads: list[str] = []
        series: list[str] = []
        for line in page.splitlines():
            if line.startswith("# HELP "):
                heads, series = families.setdefault(line.split(" ", 3)[2], ([], []))
                is_new = not heads
            if not line.startswith("#"):
                series.append(line)
            elif is_new:
                heads.append(line)
    lines = [line for heads, series in families.values() for line in (*heads, *series)]
    return "\n".join([*lines, ""])


def _key(headers: Headers, body: bytes) -> bytes:
    """What requests have in common that should meet the same server: tenant and beginning."""
    sent = next((value for name, value in headers if name == b"authorization"), b"")
    with suppress(ValueError, TypeError, AttributeError, LookupError, RecursionError):
        request = json.loads(body)
        named = request.get("prompt_cache_key")
        begin = named or request.get("prompt") or request["messages"][:2]
        return sent + json.dumps(begin)[:HEAD].encode()
    return sent + body[:HEAD]


def _whole(reply: Reply, body: bytes) -> ASGIApp:
    """An answer in one piece, as it came."""
    found = Response(body, reply.status)
    found.raw_headers = [pair for pair in reply.headers if pair[0] != b"content-length"]
    found.raw_headers.append((b"content-length", str(len(body)).encode()))
    return found


def _none(is_lost: bool) -> ApiError:
    """Nobody could answer: all are gone, or those that were asked went away."""
    text = (
        "the engine of this request went away and is started again; the request may be sent again"
        if is_lost
        else "no engine is up at the moment; they are being started, try again in a while"
    )
    return ApiError(503, text, code="engine_fault", retry_after=1 if is_lost else 10)


def _late(seconds: float) -> ApiError:
    """An engine that took a request and says nothing."""
    text = f"the engine of this request did not finish it within {seconds:.0f} s; ask for less"
    return ApiError(504, text, code="request_timeout")


def _closing() -> ApiError:
    text = "the server is shutting down; send the request elsewhere, or again in a while"
    return ApiError(503, text, code="shutting_down", retry_after=10)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
