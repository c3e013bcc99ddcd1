"""Runs the application under uvicorn; a signal lets requests finish before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from forerun.serving.app import create_app
from forerun.serving.service import Service

GRACE = 5.0  # seconds for the last bytes after `drain`


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM, then drains; a second signal ends it at once."""

    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        on_start: Callable[[str], None] = lambda url: None,
    ) -> None:
        drain = service.settings.drain
        super().__init__(
            uvicorn.Config(
                create_app(service),
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(drain + GRACE),
            )
        )
        self.service, self._on_start = service, on_start
        self.url = ""

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._on_start(self.url)

    def drain(self) -> None:
        """Accepts nothing more; ends what is left when `drain` seconds have passed."""
        self.service.worker.close()
        timer = threading.Timer(self.service.settings.drain, self.service.worker.end)
        timer.daemon = True
        timer.start()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.service.worker.end()
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
