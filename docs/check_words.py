"""Checks of wording: numbers have leading zeros, and words that slow readers down go.

The list is searched in the prose of the docs, and in the identifiers, docstrings, comments and
strings of the sources. Places that still hold such words have a limit, today's count: it may only
fall. Lower it when a count falls.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

WORDS = (
    *("told", "whose", "beside", "nobody", "anew", "dear", "hitherto", "lest", "thereof"),
    *("aught", "in vain", "unasked"),
)
PATTERN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)\s]*\)", re.MULTILINE | re.DOTALL)
BARE_NUMBER = re.compile(r"(?<![\w.)\]])\.\d")
WORD_BORDER = re.compile(r"_|(?<=[a-z0-9])(?=[A-Z])")
READ = {tokenize.NAME, tokenize.COMMENT, tokenize.STRING}
READ |= {getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # since Python 3.12

PAGE_LIMITS: dict[str, int] = {}
SOURCE_LIMITS: dict[str, int] = {
    "lossless": 1,  # in a prompt
    "tasks": 8,  # in generated prompts, which must not change
}


def prose_pages(root: Path) -> list[Path]:
    """README, CONTRIBUTING and the docs; not the reports that `bench report` writes."""
    docs, results = root / "docs", root / "docs" / "results"
    written = [p for p in docs.rglob("*.md") if p.parent == results or results not in p.parents]
    return sorted([*root.glob("README.md"), *root.glob("CONTRIBUTING.md"), *written])


def prose(text: str) -> str:
    """A page without code and link targets; lines are kept."""
    return CODE.sub(lambda found: "\n" * found.group().count("\n"), text)


def wrong_numbers(root: Path) -> list[str]:
    """One line for every line of prose with a number that lacks its leading zero."""
    return [
        f"{page.relative_to(root)}:{number}: leading zero missing: {line.strip()[:60]}"
        for page in prose_pages(root)
        for number, line in enumerate(prose(page.read_text("utf-8")).splitlines(), 1)
        if BARE_NUMBER.search(line)
    ]


def count(text: str) -> int:
    """How many words of the list a text holds."""
    return len(PATTERN.findall(" ".join(text.split())))


def page_counts(root: Path) -> Counter[str]:
    """Words of the list in the prose of each page that has any."""
    counts = {
        str(page.relative_to(root)): count(prose(page.read_text("utf-8")))
        for page in prose_pages(root)
    }
    return Counter({name: number for name, number in counts.items() if number})


def source_count(text: str) -> int:
    """Words of the list in the identifiers, docstrings, comments and strings of a module."""
    found = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in READ:
            found += count(WORD_BORDER.sub(" ", token.string))
    return found


def source_counts(package: Path) -> Counter[str]:
    """Words of the list by top folder of the package; its own modules count under their names."""
    counts: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        counts[path.relative_to(package).parts[0]] += source_count(path.read_text("utf-8"))
    return +counts


def over_limit(counts: Counter[str], limits: dict[str, int]) -> list[str]:
    """One line for every place with more words of the list than its limit, 0 by default."""
    return [
        f"{name} has {number} words of the list in docs/check_words.py, more than {limit}"
        for name, number in sorted(counts.items())
        if number > (limit := limits.get(name, 0))
    ]


def wrong_pages(root: Path) -> list[str]:
    """Pages with more words of the list than allowed."""
    return over_limit(page_counts(root), PAGE_LIMITS)


def wrong_sources(package: Path) -> list[str]:
    """Folders or files below a folder of sources with more words of the list than allowed."""
    return over_limit(source_counts(package), SOURCE_LIMITS)


def summary(root: Path) -> str:
    """The counts of today, and limits that can be lowered."""
    lines = []
    named = {"docs": (page_counts(root), PAGE_LIMITS)}
    named["src/forerun"] = (source_counts(root / "src" / "forerun"), SOURCE_LIMITS)
    for place, (counts, limits) in named.items():
        each = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
        lines.append(f"words of the list in {place}: {sum(counts.values())} ({each or 'none'})")
        lower = {n: counts[n] for n, limit in limits.items() if counts[n] < limit}
        if lower:
            lines.append(f"limits that can be lowered: {lower}")
    return "\n".join(lines)
