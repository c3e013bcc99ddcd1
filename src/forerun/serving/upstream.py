"""One HTTP exchange of the proxy with a server: sends a request and streams the answer back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Many
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

Headers = list[tuple[bytes, bytes]]
CONNECTION_ERRORS = (OSError, EOFError, h11.RemoteProtocolError)  # the server is lost
HOP_HEADERS = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"host", b"expect"}
CONNECT_SECONDS = 10.0


@dataclass
class Upstream:
    """A server that accepts requests."""

    number: int
    url: str  # http://host:port
    in_flight: int = 0  # requests
    is_lost: bool = False  # a connection broke: it gets no more requests
    num_missed: int = 0  # health checks in a row without an answer


@dataclass
class Reply:
    """The head of an answer; `chunks` streams its body."""

    status: int
    headers: Headers
    chunks: AsyncIterator[bytes]

    @property
    def streams(self) -> bool:
        """Whether it is a stream of server-sent events."""
        return dict(self.headers).get(b"content-type", b"").startswith(b"text/event-stream")

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks])


@asynccontextmanager
async def exchange(
    upstream: Upstream, method: str, target: bytes, headers: Headers, body: bytes
) -> AsyncIterator[Reply]:
    """Sends one request; leaving the block early closes the connection, which cancels the request.

    Raises one of CONNECTION_ERRORS if the server is lost before the end of the answer.
    """
    parts = urlsplit(upstream.url)
    assert parts.hostname and parts.port
    upstream.in_flight += 1
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        link = h11.Connection(h11.CLIENT)
        kept = [(name, value) for name, value in headers if name.lower() not in HOP_HEADERS]
        kept = [(name, value) for name, value in kept if name.lower() != b"content-length"]
        own: Headers = [(b"host", parts.netloc.encode()), (b"connection", b"close")]
        own.append((b"content-length", str(len(body)).encode()))
        request = h11.Request(method=method.encode(), target=target, headers=[*own, *kept])
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(link.send(event) or b"")
        await writer.drain()
        events = _events(link, reader)
        head = await anext(events)
        assert isinstance(head, h11.Response)
        passed = [(name, value) for name, value in head.headers if name not in HOP_HEADERS]
        yield Reply(head.status_code, passed, _chunks(events))
    except CONNECTION_ERRORS:
        upstream.is_lost = True
        raise
    finally:
        upstream.in_flight -= 1
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def fetch(
    upstream: Upstream, path: str, seconds: float = 5.0, headers: Many[tuple[bytes, bytes]] = ()
) -> tuple[int, bytes]:
    """Status and body of a GET. Raises one of CONNECTION_ERRORS, which include TimeoutError."""
    async with (
        asyncio.timeout(seconds),
        exchange(upstream, "GET", path.encode(), list(headers), b"") as reply,
    ):
        return reply.status, await reply.body()


async def _events(link: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[h11.Event]:
    """The events of the server's answer. Raises h11.RemoteProtocolError or EOFError."""
    while True:
        event = link.next_event()
        if event is h11.NEED_DATA:
            link.receive_data(await reader.read(65536))
        elif isinstance(event, h11.EndOfMessage):
            return
        elif isinstance(event, h11.Response | h11.Data):
            yield event
        elif isinstance(event, h11.ConnectionClosed):
            raise EOFError("the connection was closed")


async def _chunks(events: AsyncIterator[h11.Event]) -> AsyncIterator[bytes]:
    async for event in events:
        assert isinstance(event, h11.Data)
        yield bytes(event.data)
