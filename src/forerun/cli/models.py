"""`forerun models`: list embedded, pulled and available models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.assets import MODELS, embedded
from forerun.cli.options import Json
from forerun.cli.output import notice, print_json
from forerun.models.downloads import Download, downloads, pulled_folder
from forerun.models.pull import has_sizes

EMBEDDED = {
    "reasoner": "4.3M parameters, arithmetic word problems",
    "draft": "the reasoner's draft model",
}
STATES = {
    "embedded": "ships with forerun",
    "pulled": "on this machine",
    "damaged": "repair with forerun pull NAME",
    "available": "fetch with forerun pull NAME",
}


def command(is_json: Json = False) -> None:
    """List installed models and models that can be pulled."""
    rows = listed()
    if is_json:
        for row in rows:
            print_json(row)
        return
    width = max(len(row["name"]) for row in rows)
    for state, meaning in STATES.items():
        found = [row for row in rows if row["state"] == state]
        if found:
            print(f"{state} ({meaning})")
        for row in found:
            print(f"  {row['name'].ljust(width)}  {_line(row)}")
    notice("model folders, hub ids and .gguf files work too")


def listed() -> list[dict[str, Any]]:
    """All models with their state, size in bytes, licence and folder."""
    rows = [
        _row(name, "embedded", EMBEDDED[name], Path(embedded(name)), "Apache-2.0")
        for name in MODELS
    ]
    return rows + [_download_row(one) for one in downloads()]


def _download_row(one: Download) -> dict[str, Any]:
    folder = pulled_folder(one)
    if folder.is_dir():
        state = "pulled" if has_sizes(folder) else "damaged"
        row = _row(one.name, state, f"{one.title}, {one.form}", folder, one.licence)
    else:
        row = _row(one.name, "available", f"{one.title}, {one.form}", None, one.licence)
        row |= {"bytes": one.folder_size, "fetched_bytes": one.wheel_size}
    return row | {"aliases": list(one.aliases)}


def _row(name: str, state: str, title: str, folder: Path | None, licence: str) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder else 0
    path = str(folder) if folder else None
    return {
        "name": name,
        "state": state,
        "title": title,
        "licence": licence,
        "bytes": size,
        "path": path,
    }


def _line(row: dict[str, Any]) -> str:
    size = f"{row['bytes'] / 1e6:,.0f} MB"
    if row["state"] == "available":
        size = f"{row['fetched_bytes'] / 1e6:,.0f} MB to fetch, {size} on disk"
    where = f"; {row['path']}" if row["path"] else ""
    also = f"; also {', '.join(row['aliases'])}" if row.get("aliases") else ""
    return f"{row['title']}; {row['licence']}; {size}{also}{where}"
