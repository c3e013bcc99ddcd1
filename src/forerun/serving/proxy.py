"""A reverse proxy for several engines: an ASGI application that forwards requests to servers.

Requests with the same prefix and tenant go to the same server, unless it is much busier than the
others: its prefix cache and its drafters then already hold that text. If a server is lost, its
running streams end with an error event, and other requests are sent to another server, as are
requests that a server rejects as full or fails on. Keys, queues and parameters are handled by each
server.
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

from forerun.serving.errors import ApiError, Json, bad, shutting_down
from forerun.serving.limits import Limits
from forerun.serving.metrics import CONTENT_TYPE
from forerun.serving.origins import Origins
from forerun.serving.settings import Settings
from forerun.serving.streams import sse
from forerun.serving.upstream import CONNECTION_ERRORS, Headers, Reply, Upstream, exchange, fetch

log = logging.getLogger("forerun.serving")
MAX_EXTRA_REQUESTS = 4  # of a server over the least busy one before it loses a conversation
KEY_CHARS = 512  # characters of a prompt or first messages that identify a conversation
MAX_FAILURES = 2  # servers that one request may be lost or fail on
CHECKED_HEADERS = (b"origin", b"sec-fetch-site")  # by the proxy; servers have another address
RETRY_STATUSES = (429, 503)  # full or failed: another server may answer


class Backend(Protocol):
    """Starts, restarts and stops the servers."""

    up: dict[int, Upstream]  # servers that accept requests, by number

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def abort(self) -> None:
        """Makes the servers end all requests with an error."""


class Proxy:
    """The application; its lifespan starts and stops the backend. See `server.Drainable`.

    is_open: the server has no keys.
    """

    def __init__(self, backend: Backend, settings: Settings, is_open: bool = True) -> None:
        self.backend, self._is_closing = backend, False
        self._timeout = settings.request_timeout + 10  # after the server's own timeout
        self._registry = CollectorRegistry(auto_describe=False)
        made: dict[str, Any] = {"registry": self._registry}
        up = Gauge("forerun:replicas_up", "Engines that take requests", **made)
        up.set_function(lambda: len(self._alive()))
        self._retried = Counter("forerun:requests_retried", "Sent to another engine", **made)
        self._cut = Counter("forerun:streams_cut", "Streams cut by a lost engine", **made)
        text = "Requests answered with an error, by status"  # by the proxy itself
        self._errors = Counter("forerun:request_errors", text, ["status"], **made)
        limits = settings.max_body, settings.body_timeout
        limited = Limits(self._answer, *limits, self._failed)
        sites = settings.allowed_hosts, settings.allowed_origins
        self._guarded = Origins(limited, is_open, *sites, self._failed)

    def close(self) -> None:
        """Accepts no more requests; accepted ones continue."""
        self._is_closing = True

    def abort(self) -> None:
        """Ends all remaining requests with an error."""
        self._is_closing = True
        self.backend.abort()

    def _failed(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._guarded(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.backend.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.backend.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; `receive` yields its whole body, then the client's disconnect."""
        body, sent = (await receive()).get("body", b""), list[str]()

        async def record_and_send(message: Any) -> None:
            sent.append(message["type"])
            await send(message)

        pages = {"/health": self._health, "/metrics": self._metrics}
        page = pages.get(scope["path"]) if scope["method"] == "GET" else None
        work: Any = self._page(page, scope, receive, record_and_send) if page else None
        work = work or self._relay(scope, body, receive, record_and_send)
        relay = asyncio.ensure_future(work)
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        both = relay, disconnect
        try:
            await asyncio.wait(both, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            is_late = not (relay.done() or disconnect.done())
            if relay.done():
                relay.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        if is_late:
            self._failed(504)
        if is_late and not sent:
            await _timeout_error(self._timeout).response()(scope, receive, send)
        elif is_late:
            last = b"\n\n" + sse(_timeout_error(self._timeout).body())
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _page(self, page: Any, scope: Scope, receive: Receive, send: Send) -> None:
        await (await page(scope))(scope, receive, send)

    async def _relay(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Sends a request to one server after another until one answers it."""
        headers: Headers = [pair for pair in scope["headers"] if pair[0] not in CHECKED_HEADERS]
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        key, tried, failed, is_lost = _routing_key(headers, body), set[int](), 0, False
        last: ASGIApp | None = None
        full: ASGIApp | None = None  # the answer of a full server, with its Retry-After
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
                found = bad(f"this request cannot be forwarded: {wrong}").response()
                self._failed(400)
                await found(scope, receive, send)
                return
            except CONNECTION_ERRORS:
                upstream.is_lost, failed, last, is_lost = True, failed + 1, None, True
            else:
                is_lost = False
                last, failed = _response(reply, whole), failed + (reply.status == 503)
                if reply.status not in RETRY_STATUSES:
                    full = None
                    break
                full = full or (last if reply.status == 429 else None)
            if failed == MAX_FAILURES:
                full = None  # no Retry-After: a retry could crash more engines
                break
        answer = full or last
        if answer is None:
            error = shutting_down() if self._is_closing else _no_engine(is_lost)
            self._failed(error.status)
            answer = error.response()
        await answer(scope, receive, send)

    async def _stream(self, upstream: Upstream, reply: Reply, send: Send) -> None:
        """Forwards chunks; if the server is lost the stream ends with an error event."""
        head: dict[str, Any] = {"type": "http.response.start", "status": reply.status}
        chunk: dict[str, Any] = {"type": "http.response.body", "more_body": True}
        pieces, last = aiter(reply.chunks), b""
        with suppress(OSError):  # the client may disconnect
            await send(head | {"headers": reply.headers})
            while True:
                try:
                    piece = await anext(pieces, None)
                except CONNECTION_ERRORS:
                    upstream.is_lost, last = True, b"\n\n" + sse(_no_engine(True).body())
                    self._cut.inc()
                    log.warning("lost engine %d in the middle of a stream", upstream.number)
                    break
                if piece is None:
                    break
                await send(chunk | {"body": piece})
            await send(chunk | {"body": last, "more_body": False})

    def _alive(self) -> list[Upstream]:
        return [one for one in self.backend.up.values() if not one.is_lost]

    def _pick(self, key: bytes, tried: Iterable[int]) -> Upstream | None:
        """The server of this key (rendezvous hashing), unless it is much busier than others."""
        free = [one for one in self._alive() if one.number not in set(tried)]
        if not free:
            return None
        most = min(one.in_flight for one in free) + MAX_EXTRA_REQUESTS
        near = [one for one in free if one.in_flight <= most]
        return max(near, key=lambda one: hashlib.sha256(b"%d " % one.number + key).digest())

    async def _health(self, _: Scope) -> Response:
        """200 if any server accepts requests; with the counts of all and the state of each."""
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

    async def _metrics(self, scope: Scope) -> Response:
        """The merged pages of all servers; their series differ in the label `engine`.

        The servers check the key.
        """
        pages = await self._pages("/metrics", scope["headers"])
        for status, page in pages.values():
            if status in (401, 403):
                self._failed(status)
                return Response(page, status, media_type="application/json")
        texts = [page.decode() for _, (status, page) in sorted(pages.items()) if status == 200]
        own = generate_latest(self._registry).decode()
        return Response(merged([own, *texts]), media_type=CONTENT_TYPE)

    async def _pages(self, path: str, headers: Headers = []) -> dict[int, tuple[int, bytes]]:  # noqa: B006
        """A page from every server that answers: status and body by number."""
        kept = [(name, value) for name, value in headers if name == b"authorization"]
        found: dict[int, tuple[int, bytes]] = {}

        async def one(upstream: Upstream) -> None:
            with suppress(*CONNECTION_ERRORS):
                found[upstream.number] = await fetch(upstream, path, headers=kept)

        await asyncio.gather(*map(one, self._alive()))
        return found


def merged(pages: Iterable[str]) -> str:
    """One Prometheus page from several: every family once, with all series."""
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


def _routing_key(headers: Headers, body: bytes) -> bytes:
    """API key and prompt prefix; requests with equal keys go to the same server."""
    sent = next((value for name, value in headers if name == b"authorization"), b"")
    with suppress(ValueError, TypeError, AttributeError, LookupError, RecursionError):
        request = json.loads(body)
        named = request.get("prompt_cache_key")
        begin = named or request.get("prompt") or request["messages"][:2]
        return sent + json.dumps(begin)[:KEY_CHARS].encode()
    return sent + body[:KEY_CHARS]


def _response(reply: Reply, body: bytes) -> ASGIApp:
    """A complete upstream answer, unchanged."""
    found = Response(body, reply.status)
    found.raw_headers = [pair for pair in reply.headers if pair[0] != b"content-length"]
    found.raw_headers.append((b"content-length", str(len(body)).encode()))
    return found


def _no_engine(is_lost: bool) -> ApiError:
    """The error if no server is up, or the request's server was lost."""
    text = (
        "the engine of this request was lost and is restarting; send the request again"
        if is_lost
        else "no engine is up; they are starting, try again later"
    )
    return ApiError(503, text, code="engine_fault", retry_after=1 if is_lost else 10)


def _timeout_error(seconds: float) -> ApiError:
    text = f"the request was not finished within {seconds:.0f} s; ask for fewer tokens"
    return ApiError(504, text, code="request_timeout")


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
