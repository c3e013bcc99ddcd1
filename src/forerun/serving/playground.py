"""The playground at `/`: one page that loads nothing but itself and talks to this server only."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from importlib.resources import files

from fastapi import FastAPI, Response

PARTS = {"style": "playground.css", "script": "playground.js"}  # element -> file


def install(app: FastAPI) -> None:
    """Adds the page; it needs no key, but what it asks of `/v1` does."""
    page, headers = assemble()

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        """The page."""
        return Response(page, media_type="text/html", headers=headers)


def assemble() -> tuple[str, dict[str, str]]:
    """The page with its parts in place, and headers that let nothing else run or load."""
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
