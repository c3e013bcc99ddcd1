"""Checks the docs: links resolve, working methods have their pages, every module has its line.

python docs/check.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FILE_ROW = re.compile(r"^\| `([\w/]+\.py)` \|", re.MULTILINE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """All Markdown pages of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """What a heading's link is called: lower case, punctuation dropped, spaces to hyphens."""
    bare = (re.sub(r"[^\w\- ]", "", h.lower()) for h in HEADING.findall(page.read_text("utf-8")))
    return {name.strip().replace(" ", "-") for name in bare}


def broken_links(page: Path) -> Iterator[str]:
    """One line for every link of a page that leads nowhere."""
    for target in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        goal = (page.parent / name).resolve() if name else page
        where = f"{page.relative_to(ROOT)}: {target}"
        if not goal.exists():
            yield f"{where} leads nowhere"
        elif anchor and goal.suffix == ".md" and anchor not in anchors(goal):
            yield f"{where} names no heading"


def missing_pages() -> Iterator[str]:
    """One line for every method that works, wholly or partly, and has no page."""
    sys.path.insert(0, str(ROOT / "src"))
    from forerun import catalog

    for row in catalog.rows():
        if row.state != catalog.MISSING and not (ROOT / row.doc).is_file():
            yield f"catalog row {row.name!r} is marked {row.state!r}, but {row.doc} does not exist"


def untold_files() -> Iterator[str]:
    """One line for every module that docs/structure.md leaves out, or names in vain."""
    package = ROOT / "src" / "forerun"
    there = {str(p.relative_to(package)) for p in package.rglob("*.py") if p.name != "__init__.py"}
    told = set(FILE_ROW.findall((ROOT / "docs" / "structure.md").read_text("utf-8")))
    yield from (f"docs/structure.md leaves out {name}" for name in sorted(there - told))
    yield from (f"docs/structure.md names {name}, which is not there" for name in told - there)


def main() -> int:
    """Prints what is wrong; returns the exit status."""
    found = pages()
    wrong = [line for page in found for line in broken_links(page)]
    wrong += [*missing_pages(), *untold_files()]
    print("\n".join([*wrong, f"docs: {len(found)} pages, {len(wrong)} mistakes"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
