"""Connections that send no whole head in time are closed; malformed HTTP gets an error in JSON."""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from forerun.errors import in_a_line
from forerun.serving.errors import ApiError

HEAD_SECONDS = 10.0  # default


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol with a time limit for the head of a request, and our form of errors.

    A new connection may take `head_seconds` to send a whole head, and so may a request on a
    connection that was idle. Idle connections after an answer are closed by uvicorn.
    """

    head_seconds = HEAD_SECONDS
    _head_timer: asyncio.TimerHandle | None = None
    _has_sent = False  # any byte of the current head

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._set_head_timer()

    def data_received(self, data: bytes) -> None:
        self._has_sent = True
        super().data_received(data)
        self._set_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers malformed HTTP, and closes the connection. uvicorn calls it."""
        cycle, fault = self.cycle, sys.exc_info()[1]  # of the parser
        if cycle is None or cycle.response_complete or not cycle.response_started:
            why = in_a_line(fault) if fault is not None else msg
            status = getattr(fault, "error_status_hint", 400)  # of h11: also 431, 501
            text = f"the request is not valid HTTP/1.1: {why}; check its request line and headers"
            self.transport.write(_raw(ApiError(status, text)))
        self.transport.close()

    def _set_head_timer(self) -> None:
        """Starts the timer while a head is incomplete, and stops it when a request has begun."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_head_timer()
            self._has_sent = False
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_seconds, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._has_sent:
            error = ApiError(408, f"the headers did not arrive within {self.head_seconds:g} s")
            self.transport.write(_raw(error))
        self.transport.close()


def timed_protocol(head_seconds: float) -> type[TimedProtocol]:
    """The protocol class with this time limit."""
    return type("Protocol", (TimedProtocol,), {"head_seconds": head_seconds})


def _raw(error: ApiError) -> bytes:
    """An error as the bytes of a whole answer."""
    response = error.response()
    response.headers["Connection"] = "close"
    head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    head += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])
