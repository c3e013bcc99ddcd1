"""Runs the application under uvicorn; a signal lets requests finish before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from forerun.serving.app import create_app
from forerun.serving.service import Service

IDLE = 75  # seconds; if clients kept connections longer, requests would meet closed ones
GRACE = 5.0  # seconds for the last bytes after `drain`


class Ending(Protocol):
    """Whoever has requests under way."""

    def close(self) -> None:
        """Accepts nothing more; what has been accepted goes on."""

    def end(self) -> None:
        """Ends whatever is left with an error."""


class Drained(uvicorn.Server):
    """Serves an application until SIGINT or SIGTERM, then drains; a second signal ends it at once.

    drain: seconds in which requests may go on. Calls on_start with the URL once it listens.
    """

    def __init__(
        self,
        app: ASGIApp,
        work: Ending,
        drain: float,
        host: str,
        port: int,
        on_start: Callable[[str], None] = lambda url: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE,
                timeout_graceful_shutdown=int(drain + GRACE),
            )
        )
        self._work, self._drain, self._on_start = work, drain, on_start
        self.url = ""

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._on_start(self.url)

    def drain(self) -> None:
        """Accepts nothing more; ends what is left when `drain` seconds have passed."""
        self._work.close()
        timer = threading.Timer(self._drain, self._work.end)
        timer.daemon = True
        timer.start()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._work.end()
            self.force_exit = True
        else:
            self.drain()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours, for the time being; not raised again afterwards, as draining answers them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = signal.SIGINT, signal.SIGTERM
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
        host: str,
        port: int,
        on_start: Callable[[str], None] = lambda url: None,
    ) -> None:
        self.service = service
        drain = service.settings.drain
        super().__init__(create_app(service), service.worker, drain, host, port, on_start)
