"""Runs the application under uvicorn; a signal lets requests finish before it ends."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.errors import ConfigError
from forerun.serving.app import create_app
from forerun.serving.service import Service

IDLE = 75  # seconds; if clients kept connections longer, requests would meet closed ones
GRACE = 5  # seconds for the last bytes after `drain`


class Ending(Protocol):
    """Whoever has requests under way."""

    def close(self) -> None:
        """Accepts nothing more; what has been accepted goes on."""

    def end(self) -> None:
        """Ends whatever is left with an error."""


class Drained(uvicorn.Server):
    """Serves an application until SIGINT, SIGTERM or SIGHUP, then drains; a second one ends it.

    sockets: as `bound` gives them. drain: seconds in which requests may go on; meanwhile new ones
    are answered, with 503. on_start hears the URL once it listens, on_drain how many requests are
    to be finished.
    """

    def __init__(
        self,
        app: ASGIApp,
        work: Ending,
        drain: float,
        sockets: list[socket.socket],
        on_start: Callable[[str], None] = lambda url: None,
        on_drain: Callable[[int], None] = lambda count: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                _with_head_and_hangups(app),
                ws="none",
                log_level="error",  # its warnings are of what clients do wrong
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE,
                timeout_graceful_shutdown=GRACE,
            )
        )
        self._work, self._drain, self._sockets = work, drain, sockets
        self._on_start, self._on_drain = on_start, on_drain
        self._is_draining = self._was_told = False
        self._begun: set[asyncio.Task[None]] = set()  # requests under way when draining began
        self.num_cut = 0  # requests that were not finished
        self.url = ""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns when all is over. Raises ConfigError for an address that was taken meanwhile."""
        super().run(sockets or self._sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # who was bound to the same address listens by now
            host, port = (sockets or [])[0].getsockname()[:2]
            raise _unheard(host, port, error) from None
        if not (self.should_exit or self._is_draining):
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._on_start(self.url)

    async def on_tick(self, counter: int) -> bool:
        """Whether it is time to stop listening: every tenth of a second."""
        is_over, left = await super().on_tick(counter), self._num_left
        if self._is_draining and left and not self._was_told:
            self._was_told = True
            self._on_drain(left)
        return is_over or (self._is_draining and not left)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # then uvicorn leaves this out, and the application ends in a traceback
            await self.lifespan.shutdown()

    def drain(self) -> None:
        """Accepts nothing more; ends what is left when `drain` seconds have passed."""
        self._is_draining = True
        self._begun = set(self.server_state.tasks)
        self._work.close()
        timer = threading.Timer(self._drain, self._cut)
        timer.daemon = True
        timer.start()

    @property
    def _num_left(self) -> int:
        """Those that wait for a refusal, or ask for our health, are not waited for."""
        return len(self._begun & self.server_state.tasks)

    def _cut(self) -> None:
        """Ends what is left."""
        self.num_cut = self.num_cut or self._num_left
        self._work.end()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_draining:
            self._cut()
            self.force_exit = True
        else:
            self.drain()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours, for the time being; not raised again afterwards, as draining answers them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = [signal.SIGINT, signal.SIGTERM]
        if getattr(signal, "SIGHUP", None) and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            kinds.append(signal.SIGHUP)  # the terminal was closed, and nohup does not hold it off
        before = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)


class Server(Drained):
    """The server of one engine."""

    def __init__(
        self,
        service: Service,
        sockets: list[socket.socket],
        on_start: Callable[[str], None] = lambda url: None,
        on_drain: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.service = service
        drain, heard = service.settings.drain, (on_start, on_drain)
        super().__init__(create_app(service), service.worker, drain, sockets, *heard)


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets at an address, which is taken from now on; they listen when a server runs.

    host: a name may have several addresses. port: 0 takes a free one. Raises ConfigError.
    """
    if not host:
        raise ConfigError(
            "--host must be an address or a name, got ''; 127.0.0.1 is this machine alone, 0.0.0.0 "
            "all of its addresses"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be in 0..65535, got {port}; 0 takes a free one")
    found: list[socket.socket] = []
    faults: list[OSError] = []
    for family, kind, protocol, _, address in _addresses(host, port):
        try:
            one = socket.socket(family, kind, protocol)
        except OSError as fault:  # a kernel without IPv6
            faults.append(fault)
            continue
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a server that has ended
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
    # of several addresses of a name, those that this machine has not may be left out
    absent = errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT
    is_taken = any(fault.errno not in absent for fault in faults)
    if is_taken or not found:
        for one in found:
            one.close()
        raise _unheard(host, port, faults[-1])
    return found


def _addresses(host: str, port: int) -> list[Any]:
    """Families and addresses of a host's name."""
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        return list(dict.fromkeys(socket.getaddrinfo(host, port, type=kind, flags=flags)))
    except (OSError, ValueError) as fault:  # ValueError: no name at all
        raise _unheard(host, port, fault) from None


def _unheard(host: str, port: int, fault: Exception) -> ConfigError:
    """Why nobody can listen at an address."""
    reason = getattr(fault, "strerror", None) or "there is no such address"
    return ConfigError(
        f"cannot listen at {host}:{port}: {reason}; choose another --host or --port (0: a free one)"
    )


def _with_head_and_hangups(app: ASGIApp) -> ASGIApp:
    """HEAD is answered as GET, uvicorn leaves out the body; who has gone is not written to."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_look(message: Message) -> None:
            await send(message)
            await asyncio.sleep(0)  # the loop tells of a lost connection between two pieces

        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await app({**scope, "method": "GET"} if is_head else scope, receive, send_and_look)

    return answer
