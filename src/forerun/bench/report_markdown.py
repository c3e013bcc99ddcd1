"""The parts of a report, and the report as GitHub-flavoured Markdown.

The HTML page is written from the same parts, so a figure cannot differ between the two.
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
    """The text of a table cell, and the value that it is sorted by."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    best: frozenset[int] = frozenset()  # highlighted rows
    has_sentences: bool = False
    note: str = ""  # shown below the table

    def is_text(self, column: int) -> bool:
        """Whether a column holds words, aligned to the left."""
        if column == 0 or self.has_sentences:
            return True
        return any(isinstance(row[column], str) for row in self.rows)


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables and definitions."""

    title: str
    prose: Sequence[str] = ()
    tables: Sequence[Table] = ()
    terms: Sequence[tuple[str, str]] = ()  # term, meaning
    folds: bool = False  # whether the tables after the first are folded in HTML


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    tiles: Sequence[tuple[str, str]]  # figure, words
    summary: Sequence[str]
    context: str  # machine, sampling, tasks, date
    alerts: Sequence[str]
    remarks: Sequence[str]
    charts: Sequence[tuple[str, str]]  # title, SVG
    sections: Sequence[Section]


def clean(words: str) -> str:
    """Text without control characters that could recolour or reorder a report, valid as UTF-8."""
    return _CONTROL.sub("", words.replace("\r\n", "\n")).encode("utf-8", "replace").decode()


def cell_text(cell: Cell | str) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def escaped(words: str) -> str:
    """Text on one line, with the marks of Markdown escaped."""
    return _MARKS.sub(r"\\\1", " / ".join(filter(None, map(str.strip, words.splitlines()))))


def to_markdown(report: Report) -> str:
    """The report as Markdown, without charts."""
    parts = [f"# {escaped(report.title)}"]
    parts += [f"> **{escaped(alert)}**" for alert in report.alerts]
    parts += [escaped(report.context)]
    tiles = [f"- **{escaped(value)}** {escaped(words)}" for value, words in report.tiles]
    parts += ["\n".join([*tiles, *(f"- {escaped(line)}" for line in report.summary)])]
    parts.append("\n".join(f"- {escaped(line)}" for line in report.remarks))
    for section in report.sections:
        parts += _section(section)
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(section: Section) -> list[str]:
    parts = [f"## {escaped(section.title)}"]
    parts += [escaped(line) for line in section.prose]
    for table in section.tables:
        parts += [f"### {escaped(table.title)}" if table.title else "", _table(table)]
        parts += [escaped(table.note)]
    parts += ["\n".join(f"- **{escaped(t)}**: {escaped(m)}" for t, m in section.terms)]
    return parts


def _table(table: Table) -> str:
    align = ["---" if table.is_text(i) else "---:" for i in range(len(table.columns))]
    rows = [[escaped(name) for name in table.columns], align]
    for i, row in enumerate(table.rows):
        cells = [escaped(cell_text(cell)) for cell in row]
        rows.append([f"**{cell}**" if i in table.best and cell else cell for cell in cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
