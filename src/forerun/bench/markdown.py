"""What a report consists of, and its form in GitHub-flavoured Markdown.

Both forms of a report are written from the same tables, so a figure cannot differ between them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
_MARKS = re.compile(r"([\\`*_\[\]<>|~#&$])")


@dataclass(frozen=True)
class Cell:
    """What a table shows at one place, and the value to sort it by."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    best: frozenset[int] = frozenset()  # rows that win
    words: bool = False  # cells hold sentences, not figures

    def is_text(self, column: int) -> bool:
        """Whether a column holds words: it is aligned to the left."""
        return column == 0 or self.words or any(isinstance(row[column], str) for row in self.rows)


@dataclass(frozen=True)
class Chart:
    """A picture with a caption; every figure in it is in a table or in its description."""

    title: str
    svg: str


@dataclass(frozen=True)
class Section:
    """One heading with what stands under it."""

    title: str
    prose: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    terms: Sequence[tuple[str, str]] = ()  # term, meaning
    folds: bool = False  # whether the tables after the first are looked at when wanted


@dataclass(frozen=True)
class Report:
    """A whole report; `alerts` say what is incomplete."""

    title: str
    tiles: Sequence[tuple[str, str]]  # a figure and its words
    headline: Sequence[str]
    context: str  # on what machine, when
    alerts: Sequence[str]
    remarks: Sequence[str]  # what to know before believing it
    pictures: Sequence[Chart]
    sections: Sequence[Section]


def clean(words: str) -> str:
    """Text of a record without what could reorder or colour the report, and encodable as UTF-8."""
    return _CONTROL.sub("", words.replace("\r\n", "\n")).encode("utf-8", "replace").decode()


def shown(cell: Cell | str) -> str:
    """The text of a cell."""
    return cell.text if isinstance(cell, Cell) else cell


def marked(words: str) -> str:
    """Text as Markdown that shows it as it is, on one line."""
    return _MARKS.sub(r"\\\1", " / ".join(filter(None, map(str.strip, words.splitlines()))))


def render(report: Report, picture: str | None = None) -> str:
    """The report in Markdown; `picture` is the link of its first chart."""
    parts = [f"# {marked(report.title)}"]
    parts += [f"> **{marked(alert)}**" for alert in report.alerts]
    parts += [marked(report.context)]
    tiles = [f"- **{marked(value)}** {marked(words)}" for value, words in report.tiles]
    parts += ["\n".join([*tiles, *(f"- {marked(line)}" for line in report.headline)])]
    if picture and report.pictures:
        parts.append(f"![{marked(report.pictures[0].title)}]({picture})")
    parts.append("\n".join(f"- {marked(line)}" for line in report.remarks))
    for section in report.sections:
        parts += _section(section)
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(section: Section) -> list[str]:
    parts = [f"## {marked(section.title)}"]
    parts += [marked(line) for line in section.prose]
    for table in section.tables:
        parts += [f"### {marked(table.title)}" if table.title else "", _table(table)]
    parts += ["\n".join(f"- **{marked(t)}**: {marked(m)}" for t, m in section.terms)]
    return parts


def _table(table: Table) -> str:
    align = ["---" if table.is_text(i) else "---:" for i in range(len(table.columns))]
    rows = [[marked(name) for name in table.columns], align]
    for i, row in enumerate(table.rows):
        cells = [marked(shown(cell)) for cell in row]
        rows.append([f"**{cell}**" if i in table.best and cell else cell for cell in cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
