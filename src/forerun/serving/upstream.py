"""One exchange with a server behind the front: a request out, its answer back piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

Headers = list[tuple[bytes, bytes]]
LOST = (OSError, EOFError, h11.RemoteProtocolError)  # the server has gone, or is going
HOPS = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"host", b"expect"}
PATIENCE = 10.0  # seconds to connect


@dataclass
class Upstream:
    """A server that takes requests, and how many it is at."""

    number: int
    url: str  # http://host:port
    in_flight: int = 0
    is_lost: bool = False  # a connection broke: nothing more is sent there
    num_missed: int = 0  # looks in a row that it did not answer


@dataclass
class Reply:
    """The beginning of an answer; `chunks` is its body as it comes."""

    status: int
    headers: Headers
    chunks: AsyncIterator[bytes]

    @property
    def streams(self) -> bool:
        """Whether it is to be passed on piece by piece."""
        return dict(self.headers).get(b"content-type", b"").startswith(b"text/event-stream")

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([chunk async for chunk in self.chunks])


@asynccontextmanager
async def exchange(
    upstream: Upstream, method: str, target: bytes, headers: Headers, body: bytes
) -> AsyncIterator[Reply]:
    """Sends one request; leaving the block early closes the connection, which cancels the request.

    Raises one of LOST when the server goes away before all has come.
    """
    parts = urlsplit(upstream.url)
    assert parts.hostname and parts.port
    upstream.in_flight += 1
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        link = h11.Connection(h11.CLIENT)
        kept = [(name, value) for name, value in headers if name.lower() not in HOPS]
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
        passed = [(name, value) for name, value in head.headers if name not in HOPS]
        yield Reply(head.status_code, passed, _chunks(events))
    except LOST:
        upstream.is_lost = True
        raise
    finally:
        upstream.in_flight -= 1
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def fetch(upstream: Upstream, path: str, seconds: float = 5.0) -> tuple[int, bytes]:
    """Status and body of a page of the server's own. Raises one of LOST, or TimeoutError."""
    async with (
        asyncio.timeout(seconds),
        exchange(upstream, "GET", path.encode(), [], b"") as reply,
    ):
        return reply.status, await reply.body()


async def _events(link: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[h11.Event]:
    """What the server says, up to the end of its answer. Raises h11.RemoteProtocolError."""
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
