"""Runs the application in uvicorn; a signal lets requests finish before it stops."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.errors import ConfigError
from forerun.serving.app import create_app
from forerun.serving.connections import HEAD_SECONDS, timed_protocol
from forerun.serving.errors import shutting_down
from forerun.serving.service import Service
from forerun.serving.streams import sse

KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, which must not meet a close
GRACE_SECONDS = 5  # for the last bytes after `drain`
ANSWER_SECONDS = 1.0  # for a request to end by itself after `drain`
MAX_STOP_SECONDS = 5.0  # for the process to end after the last request
AT_ONCE_SECONDS = 1.5  # for the process to end after a second signal


class Drainable(Protocol):
    """The owner of running requests."""

    def close(self) -> None:
        """Accepts no more requests; accepted ones continue."""

    def abort(self) -> None:
        """Ends all remaining requests with an error."""


class DrainingServer(uvicorn.Server):
    """Serves an application until SIGINT, SIGTERM or SIGHUP, then drains; a second one stops it.

    sockets: from `bind_sockets`. drain: seconds for running requests to finish; new requests then
    get 503. on_start: called with the URL when it listens. on_drain: called with the number of
    running requests. head_seconds: for the headers of a request to arrive.
    """

    owns_process = False  # whether a signal may end the process when requests do not end

    def __init__(
        self,
        app: ASGIApp,
        work: Drainable,
        drain: float,
        sockets: list[socket.socket],
        on_start: Callable[[str], None] = lambda url: None,
        on_drain: Callable[[int], None] = lambda count: None,
        head_seconds: float = HEAD_SECONDS,
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()  # set when the remaining requests are cut
        self._owns_process = False  # whether signals come here, and may end the process
        super().__init__(
            uvicorn.Config(
                self._with_end(_with_head_and_disconnects(app)),
                http=timed_protocol(head_seconds),
                ws="none",
                log_level="error",  # its warnings are about client errors
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self._work, self._drain, self._sockets = work, drain, sockets
        self._on_start, self._on_drain = on_start, on_drain
        self._is_draining = self._has_reported = False
        self._draining: set[asyncio.Task[None]] = set()  # requests running when draining started
        self.num_cut = 0  # requests that were not finished
        self.url = ""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Runs until shutdown. Raises ConfigError if another process took the address meanwhile."""
        super().run(sockets or self._sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except OSError as error:  # another process bound to the address listens already
            host, port = (sockets or [])[0].getsockname()[:2]
            raise _listen_error(host, port, error) from None
        if not (self.should_exit or self._is_draining):
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._on_start(self.url)

    async def on_tick(self, counter: int) -> bool:
        """Called every 0.1 s; returns whether to stop listening."""
        is_over, left = await super().on_tick(counter), self._num_left
        if self._is_draining and left and not self._has_reported:
            self._has_reported = True
            self._on_drain(left)
        return is_over or (self._is_draining and not left)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this, and the application would end in a traceback
            await self.lifespan.shutdown()

    def drain(self) -> None:
        """Accepts no more requests; aborts the remaining ones after `drain` seconds."""
        self._is_draining = True
        self._draining = set(self.server_state.tasks)
        self._work.close()
        timer = threading.Timer(self._drain, self._cut)
        timer.daemon = True
        timer.start()

    def _with_end(self, app: ASGIApp) -> ASGIApp:
        """Ends requests that are still unanswered shortly after the cut, with 503."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            sent: list[str] = []

            async def record_and_send(message: Any) -> None:
                await send(message)
                sent.append(message["type"] if message.get("more_body") is not False else "end")

            task = asyncio.ensure_future(app(scope, receive, record_and_send))
            end = asyncio.ensure_future(self._end.wait())
            try:
                await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():  # the engine ends its requests first
                    await asyncio.wait({task}, timeout=ANSWER_SECONDS)
                if task.done():
                    task.result()
                    return
                task.cancel()
                await asyncio.wait({task}, timeout=ANSWER_SECONDS)
                await _send_end(sent, scope, receive, send)
            finally:
                task.cancel()
                end.cancel()

        return answer

    @property
    def _num_left(self) -> int:
        """Requests from before the drain; later ones, as health checks, do not delay it."""
        return len(self._draining & self.server_state.tasks)

    def _cut(self) -> None:
        """Aborts the remaining requests."""
        self.num_cut = self.num_cut or self._num_left
        self._work.abort()
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._end.set)
        if self._owns_process:
            exit_later(0, GRACE_SECONDS + MAX_STOP_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_draining:
            self._cut()
            self.force_exit = True
            if self._owns_process:
                exit_later(130, AT_ONCE_SECONDS)
        else:
            self.drain()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs our handlers; unlike uvicorn's, signals are not raised again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = [signal.SIGINT, signal.SIGTERM]
        if getattr(signal, "SIGHUP", None) and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            kinds.append(signal.SIGHUP)  # the terminal was closed, without nohup
        before = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        self._owns_process = self.owns_process
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)


async def _send_end(sent: list[str], scope: Scope, receive: Receive, send: Send) -> None:
    """503 to a request without an answer; the last event to a stream."""
    with suppress(Exception):  # the client may be gone
        if not sent:
            await shutting_down().response()(scope, receive, send)
        elif sent[-1] != "end":
            last = b"\n\n" + sse(shutting_down().body())
            await send({"type": "http.response.body", "body": last, "more_body": False})


def exit_later(status: int, seconds: float) -> None:
    """Ends the process after some seconds, whatever still runs; nothing if it ends before."""

    def end() -> None:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


class Server(DrainingServer):
    """The server of one engine."""

    def __init__(
        self,
        service: Service,
        sockets: list[socket.socket],
        on_start: Callable[[str], None] = lambda url: None,
        on_drain: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.service = service
        settings, callbacks = service.settings, (on_start, on_drain)
        work = create_app(service), service, settings.drain, sockets
        super().__init__(*work, *callbacks, settings.head_timeout)


def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Binds sockets to all addresses of a host; a server later listens on them.

    port: 0 selects a free one. Raises ConfigError.
    """
    if not host:
        raise ConfigError(
            "--host must be an address or a name, got ''; use 127.0.0.1 for this machine only, "
            "0.0.0.0 for all of its addresses"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be in 0..65535, got {port}; 0 selects a free one")
    found: list[socket.socket] = []
    faults: list[OSError] = []
    for family, kind, protocol, _, address in _addresses(host, port):
        try:
            one = socket.socket(family, kind, protocol)
        except OSError as fault:  # a kernel without IPv6
            faults.append(fault)
            continue
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a server has stopped
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            one.bind((address[0], port, *address[2:]))
        except OSError as fault:
            one.close()
            faults.append(fault)
        else:
            found.append(one)
            port = one.getsockname()[1]
    # addresses of the name that this machine does not have are skipped
    absent = errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT
    is_taken = any(fault.errno not in absent for fault in faults)
    if is_taken or not found:
        for one in found:
            one.close()
        raise _listen_error(host, port, faults[-1])
    return found


def _addresses(host: str, port: int) -> list[Any]:
    """The results of getaddrinfo for a host, without duplicates. Raises ConfigError."""
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        return list(dict.fromkeys(socket.getaddrinfo(host, port, type=kind, flags=flags)))
    except (OSError, ValueError) as fault:  # ValueError: not a valid name
        raise _listen_error(host, port, fault) from None


def _listen_error(host: str, port: int, fault: Exception) -> ConfigError:
    reason = getattr(fault, "strerror", None) or "there is no such address"
    return ConfigError(
        f"cannot listen at {host}:{port}: {reason}; choose another --host or --port (0: a free one)"
    )


def _with_head_and_disconnects(app: ASGIApp) -> ASGIApp:
    """Answers HEAD as GET (uvicorn drops the body), and detects disconnects between chunks."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_yield(message: Message) -> None:
            await send(message)
            await asyncio.sleep(0)  # lets the event loop report a lost connection

        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await app({**scope, "method": "GET"} if is_head else scope, receive, send_and_yield)

    return answer
