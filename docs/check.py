"""Checks the docs: links, page lengths, sections, option tables, commands, numbers and words.

python docs/check.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import check_parts
import check_words

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
SECTIONS = ["What it does", "How it works", "Use it", "Options", "Results and limits"]
MAX_METHOD_LINES = 80
MAX_LINES = {"README.md": 150, "docs/results/LOG.md": 400}
MAX_CHARACTERS = {"README.md": 9_000}


def pages(root: Path) -> list[Path]:
    """All Markdown pages of the project."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """The link names of all headings: lower case, no punctuation, hyphens for spaces."""
    bare = (re.sub(r"[^\w\- ]", "", h.lower()) for h in HEADING.findall(page.read_text("utf-8")))
    return {name.strip().replace(" ", "-") for name in bare}


def broken_links(page: Path, root: Path) -> Iterator[str]:
    """One line for every link of a page to a missing file or heading."""
    for target in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        goal = (page.parent / name).resolve() if name else page
        where = f"{page.relative_to(root)}: {target}"
        if not goal.exists():
            yield f"{where} leads nowhere"
        elif anchor and goal.suffix == ".md" and anchor not in anchors(goal):
            yield f"{where} names no heading"


def missing_pages(root: Path) -> Iterator[str]:
    """One line for every method that works, wholly or partly, and has no page."""
    from forerun import catalog

    for row in catalog.rows():
        if row.state != catalog.MISSING and not (root / row.doc).is_file():
            yield f"catalog row {row.name!r} is marked {row.state!r}, but {row.doc} does not exist"


def undescribed_files(root: Path) -> Iterator[str]:
    """One line for every module without a docstring: its first line is the index of a folder."""
    for path in sorted((root / "src" / "forerun").rglob("*.py")):
        text = path.read_text("utf-8")
        if text.strip() and not ast.get_docstring(ast.parse(text)):
            yield f"{path.relative_to(root)} has no docstring"


def long_pages(page: Path, root: Path) -> Iterator[str]:
    """A line if the page is longer than pages of its kind may be."""
    name, text = str(page.relative_to(root)), page.read_text("utf-8")
    is_method = page.parent == root / "docs" / "methods"
    max_lines = MAX_METHOD_LINES if is_method else MAX_LINES.get(name)
    num_lines = len(text.splitlines())
    if max_lines and num_lines > max_lines:
        yield f"{name} has {num_lines} lines; the limit is {max_lines}"
    max_characters = MAX_CHARACTERS.get(name)
    if max_characters and len(text) > max_characters:
        yield f"{name} has {len(text)} characters; the limit is {max_characters}"


def wrong_sections(page: Path) -> Iterator[str]:
    """One line if the title, and one if the five sections of a method page are not as expected."""
    text = CODE.sub("", page.read_text("utf-8"))
    if not re.match(rf"# {re.escape(page.stem)}: \S", text):
        yield f"{page.name}: the title must be '# {page.stem}: one line'"
    found = re.findall(r"^## +(.+?) *$", text, re.MULTILINE)
    if found != SECTIONS:
        yield f"{page.name}: sections are {found}; expected {SECTIONS}"


def mistakes(root: Path) -> list[str]:
    """Everything that is wrong in the docs of a checkout, one line each."""
    found, methods = pages(root), sorted((root / "docs" / "methods").glob("*.md"))
    wrong = [line for page in found for line in broken_links(page, root)]
    wrong += [line for page in found for line in long_pages(page, root)]
    wrong += [line for page in methods for line in wrong_sections(page)]
    wrong += [line for page in methods for line in check_parts.wrong_options(page)]
    wrong += [line for page in methods for line in check_parts.wrong_commands(page)]
    wrong += check_parts.undocumented(methods)
    wrong += [*missing_pages(root), *undescribed_files(root)]
    wrong += check_words.wrong_numbers(root) + check_words.wrong_pages(root)
    for folder in ("src/forerun", "benchmarks", "examples"):
        wrong += check_words.wrong_sources(root / folder)
    return wrong


def main() -> int:
    """Prints what is wrong and the word counts; returns the exit status."""
    sys.path.insert(0, str(ROOT / "src"))
    wrong = mistakes(ROOT)
    print(check_words.summary(ROOT))
    print("\n".join([*wrong, f"docs: {len(pages(ROOT))} pages, {len(wrong)} mistakes"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
