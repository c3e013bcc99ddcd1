"""Writes the tables of the parts into a page, between comments that mark their places."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from forerun.errors import DataError
from forerun.utils.files import write_atomically


def write_report(page: Path, out: Path, parts: Sequence[str]) -> None:
    """Replaces the text between `<!-- PART -->` and `<!-- end of PART -->` by <part>.md of `out`.

    Parts without results keep what the page has. Raises DataError for a page without the marks.
    """
    text = page.read_text("utf-8")
    for part in parts:
        if (found := out / f"{part}.md").exists():
            text = replaced(text, part, found.read_text("utf-8"), page)
    write_atomically(page, lambda path: path.write_text(text, encoding="utf-8"))


def replaced(text: str, part: str, table: str, page: Path) -> str:
    """The page with the table of one part."""
    start, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
    place = re.compile(f"({re.escape(start)}\n).*?(\n{re.escape(end)})", re.DOTALL)
    if len(place.findall(text)) != 1:
        raise DataError(f"{page} has no place for {part}; add the lines {start!r} and {end!r}")
    return place.sub(lambda found: f"{found[1]}\n{table.strip()}\n{found[2]}", text)
