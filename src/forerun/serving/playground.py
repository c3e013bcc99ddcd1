"""The playground at `/`: a self-contained page that connects only to this server."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from importlib.resources import files

from fastapi import FastAPI, Response

PARTS = {"style": "playground.css", "script": "playground.js"}  # element -> file


def install(app: FastAPI) -> None:
    """Adds the page; it needs no API key, but its requests to `/v1` do."""
    page, headers = assemble()

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        """The page."""
        return Response(page, media_type="text/html", headers=headers)


def assemble() -> tuple[str, dict[str, str]]:
    """The page with style and script, and headers that block all other content."""
    page, rules = _read("playground.html"), []
    for tag, name in PARTS.items():
        text = _read(name)
        page = page.replace(f"/*{tag}*/", text)
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    rules += ["connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    return page, {
        "Content-Security-Policy": "; ".join(
            ["default-src 'none'", *rules, "frame-ancestors 'none'"]
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _read(name: str) -> str:
    return (files("forerun.serving") / name).read_text("utf-8")
