"""The playground at `/`: one page that loads nothing but itself and talks to this server only."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Response

PAGE = "playground.html"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def install(app: FastAPI) -> None:
    """Adds the page; it needs no key, but what it asks of `/v1` does."""
    page = (files("forerun.serving") / PAGE).read_bytes()

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        """The page."""
        return Response(page, media_type="text/html; charset=utf-8", headers=HEADERS)
