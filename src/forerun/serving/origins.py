"""Refuses requests that pages of other sites make with the browser of a user.

Without API keys a request is trusted by where it comes from, so `Host` must name this server
(against DNS rebinding) and `Origin` must be this server or an allowed site. With keys the key
protects, as no other site knows it. Allowed sites get CORS headers and answers to preflight
requests.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.errors import ConfigError
from forerun.serving.errors import ApiError

ANY = "*"
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+)(?::(\d+))?", re.ASCII)
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[\w.-]+)(?::(\d+))?", re.ASCII)
DEFAULT_PORTS = {"http": "80", "https": "443"}
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
PREFLIGHT_SECONDS = 600  # that a browser may keep the answer


class Origins:
    """ASGI middleware: checks `Host` and `Origin`, and answers preflight requests.

    is_open: the server has no keys. hosts, origins: further allowed ones; "*" is all. on_error:
    receives the status of a refused request.
    """

    def __init__(
        self,
        app: ASGIApp,
        is_open: bool,
        hosts: Iterable[str],
        origins: Iterable[str],
        on_error: Callable[[int], None],
    ) -> None:
        self.app, self.is_open, self._on_error = app, is_open, on_error
        self.hosts = {socket.gethostname().lower(), *map(str.lower, hosts)}
        self.origins = {*map(str.lower, origins)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        is_allowed = origin is not None and self._is_allowed(origin)
        cors = self._cors(origin) if is_allowed else {}
        is_preflight = scope["method"] == "OPTIONS" and origin is not None
        try:
            self._check(scope["method"], headers, is_preflight)
        except ApiError as error:
            self._on_error(error.status)
            answer: ASGIApp = error.response()
            answer.headers["Connection"] = "close"  # type: ignore[attr-defined]  # body is not read
            await answer(scope, receive, send)
            return
        if is_preflight:
            await Response(status_code=204, headers=cors | _preflight(headers))(
                scope, receive, send
            )
            return
        await self.app(scope, receive, _with_headers(send, cors) if cors else send)

    def _check(self, method: str, headers: Headers, is_preflight: bool) -> None:
        """Raises ApiError 403 for a foreign host or site."""
        origin, host = headers.get("origin"), headers.get("host")
        if self.is_open and host is not None and not self._is_own_host(host):
            raise ApiError(
                403,
                f"this server is not {host[:80]!r}; use its address, or start it with "
                "--allowed-hosts NAME",
                code="host_not_allowed",
            )
        if not (self.is_open or is_preflight):
            return
        is_foreign = origin is not None and not (
            self._is_allowed(origin) or _is_same(origin, host or "")
        )
        if origin is None and method not in SAFE_METHODS:
            is_foreign = headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        if is_foreign:
            raise ApiError(
                403,
                f"requests of pages at {(origin or 'another site')[:80]!r} are refused; start the "
                "server with --allowed-origins ORIGIN to allow them",
                code="origin_not_allowed",
            )

    def _is_allowed(self, origin: str) -> bool:
        return ANY in self.origins or origin.lower() in self.origins

    def _is_own_host(self, host: str) -> bool:
        """Whether a `Host` is no domain name that others may point here, or an allowed name.

        These are IP addresses and names without a dot, which cannot be registered: localhost, this
        machine, a container.
        """
        if ANY in self.hosts:
            return True
        found = HOST.fullmatch(host.lower())
        if found is None:
            return False
        name = found[1].rstrip(".")
        with suppress(ValueError):
            return bool(ip_address(name.strip("[]")))
        if "." not in name or name.endswith(".localhost"):
            return True
        domains = (one.removeprefix(ANY) for one in self.hosts if one.startswith((".", "*.")))
        return name in self.hosts or name.endswith(tuple(domains))

    def _cors(self, origin: str | None) -> dict[str, str]:
        """Headers that let a page of an allowed site read the answer."""
        return {
            "Access-Control-Allow-Origin": origin or "",
            "Access-Control-Expose-Headers": "Retry-After",
            "Vary": "Origin",
        }


def check_origins(origins: Iterable[str]) -> None:
    """Raises ConfigError for anything but SCHEME://HOST[:PORT], null and *."""
    for one in origins:
        if one not in (ANY, "null") and not ORIGIN.fullmatch(one.lower()):
            raise ConfigError(
                f"allowed_origins must be SCHEME://HOST or SCHEME://HOST:PORT, got {one!r}; give "
                "e.g. http://localhost:3000"
            )


def check_hosts(hosts: Iterable[str]) -> None:
    """Raises ConfigError for anything but a host name without a port, *.DOMAIN and *."""
    for one in hosts:
        found = HOST.fullmatch(one.lower().removeprefix("*").lstrip("."))
        if one != ANY and (found is None or found[2]):
            raise ConfigError(
                f"allowed_hosts must be names without scheme and port, got {one!r}; give e.g. "
                "llm.example.org"
            )


def check_json(request: Request) -> None:
    """Raises ApiError 415 for a body that is not declared as JSON.

    Browsers send other types to other sites without asking.
    """
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json":
        shown = f"got {given[:60]!r}" if given else "it is missing"
        raise ApiError(
            415,
            f"the header Content-Type must be application/json, {shown}; set it",
            code="unsupported_media_type",
        )


def _is_same(origin: str, host: str) -> bool:
    """Whether an origin is the host that was asked."""
    site, own = ORIGIN.fullmatch(origin.lower()), HOST.fullmatch(host.lower())
    if site is None or own is None or site[1] not in DEFAULT_PORTS:
        return False
    usual = DEFAULT_PORTS[site[1]]
    return (site[2], site[3] or usual) == (own[1], own[2] or usual)


def _preflight(headers: Headers) -> dict[str, str]:
    wanted = headers.get("access-control-request-headers", "authorization, content-type")
    found = {
        "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
        "Access-Control-Allow-Headers": wanted,
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
    }
    if headers.get("access-control-request-private-network") == "true":
        found["Access-Control-Allow-Private-Network"] = "true"
    return found


def _with_headers(send: Send, more: dict[str, str]) -> Send:
    """A `send` that adds headers to the answer."""

    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            found = MutableHeaders(scope=message)
            for name, value in more.items():
                found[name] = value
        await send(message)

    return send_with_headers
