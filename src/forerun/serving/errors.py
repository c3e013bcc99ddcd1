"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}.

A message states the problem, the value and the fix. Details of internal errors are in the log only;
keys and prompts are in neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from forerun.errors import CapacityError, ConfigError, ForerunError, LawError, did_you_mean

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error with its HTTP status.

    retry_after: seconds until a client may try again. allow: HTTP methods of the path.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.allow = retry_after, allow

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Json(self.body(), self.status, headers=headers)


class Json(JSONResponse):
    """JSON in ASCII, as text of clients may contain lone surrogates, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A client error."""
    return ApiError(400, message, param=param, code=code)


def given_up(reason: str, param: str | None) -> ApiError:
    """The error for a text that its constraint gave up."""
    text = f"the constraint needs too much work for this text: {reason}"
    return bad(f"{param}: {text}" if param else text, param, "grammar_limit")


def no_token_left(param: str) -> ApiError:
    """The error for a text that the constraint and other parameters could not end."""
    return bad(
        f"{param}: after some text no token was left that both the constraint and banned_tokens "
        "allow; change one of them",
        param,
        "no_token_left",
    )


def unknown(kind: str, name: str, known: Iterable[str], **fields: Any) -> ApiError:
    """The error for an unknown name, with the nearest names or all."""
    known = sorted(known)
    hint = did_you_mean(name, known, f"known: {', '.join(known)}")
    shown = name if len(name) <= 80 else name[:77] + "..."
    return ApiError(fields.pop("status", 400), f"unknown {kind} {shown!r}; {hint}", **fields)


def shutting_down() -> ApiError:
    """The error for requests that a stopping server does not finish."""
    text = "the server is shutting down; use another server, or try again later"
    return ApiError(503, text, code="shutting_down", retry_after=10)


def of_fault(fault: Exception) -> ApiError:
    """The error for the requests of a failed step."""
    if isinstance(fault, ApiError):
        return fault
    if isinstance(fault, CapacityError | MemoryError):
        return ApiError(
            503, f"not enough memory for this request: {fault}", code="capacity", retry_after=5
        )
    if isinstance(fault, LawError):  # not 503: a retry would fail in the same way
        return ApiError(
            500,
            "the model's logits for this text are not finite; see the server log for the cause",
            code="model_fault",
        )
    if isinstance(fault, ConfigError):
        return bad(str(fault))
    return engine_fault(fault)


def engine_fault(fault: Exception) -> ApiError:
    """The error for requests that ended by a fault of the engine; it has no details."""
    return ApiError(
        503,
        f"internal error of the engine ({type(fault).__name__}) on this request; send it again",
        code="engine_fault",
        retry_after=1,
    )


def install(app: FastAPI, on_error: Callable[[int], None]) -> None:
    """Installs handlers that turn every exception into an `ApiError`; on_error: gets its status."""

    async def answer(request: Request, error: Any) -> JSONResponse:
        known = as_api(request, error)
        on_error(known.status)
        return known.response()

    for kind in (ApiError, ForerunError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def as_api(request: Request, error: Exception) -> ApiError:
    """Any exception of a route as an `ApiError`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ForerunError):
        return bad(str(error))
    status = getattr(error, "status_code", 500)
    where = f"{request.method} {request.url.path[:80]}"
    if status == 404:
        return unknown("path", where, routes(request.app), status=404, code="unknown_url")
    if status == 405:
        known, allowed = routes(request.app), methods(request.app, request.url.path)
        about = f"{where} is not allowed; known: {', '.join(known)}"
        return ApiError(405, about, allow=", ".join(allowed))
    if isinstance(error, HTTPException):
        return ApiError(status, str(error.detail))
    return ApiError(500, "internal error of the server; see the server log")


def routes(app: FastAPI) -> list[str]:
    """Method and path of every route of an application, without HEAD, as "GET /health"."""
    known = _routes(app)
    return sorted(f"{m} {r.path_format}" for r in known for m in r.methods or () if m != "HEAD")


def methods(app: FastAPI, path: str) -> list[str]:
    """The HTTP methods of a path; every path with GET also answers HEAD."""
    found = {m for r in _routes(app) if r.path_regex.match(path) for m in r.methods or ()}
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


def _routes(app: FastAPI) -> list[Route]:
    return [route for route in app.routes if isinstance(route, Route)]
