"""A report as one HTML page without external files; all text of records is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from forerun.bench.charts import HATCH, STYLE
from forerun.bench.report_markdown import Cell, Report, Section, Table, cell_text

TEMPLATE = Path(__file__).with_name("page.html")
_BREAK = re.compile(r"(?<=[:,+/])(?=.)")  # where the long name of a method may wrap


def to_html(report: Report) -> str:
    """The page of a report."""
    links = "".join(
        f'<a href="#part{i}">{escape(part.title)}</a>' for i, part in enumerate(report.sections)
    )
    body = [
        f"<header><h1>{escape(report.title)}</h1>",
        f'<p class="quiet">{escape(report.context)}</p>',
        *(f'<p class="alert" role="alert">{escape(line)}</p>' for line in report.alerts),
        _tiles(report.tiles),
        f"{_list(report.summary)}</header>",
        f"<main>{_charts(report.charts)}{_list(report.remarks, 'quiet')}",
        f'<nav aria-label="Contents">{links}</nav>',
        *(_section(part, f"part{i}") for i, part in enumerate(report.sections)),
        "</main>",
    ]
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(report.title), style=STYLE, defs=HATCH, body="\n".join(body)
    )


def _list(lines: Sequence[str], kind: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _tiles(tiles: Sequence[tuple[str, str]]) -> str:
    cells = (
        f"<div><dt>{escape(words)}</dt><dd>{escape(value)}</dd></div>" for value, words in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _charts(charts: Sequence[tuple[str, str]]) -> str:
    figures = (
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in charts
    )
    return f'<div class="charts">{"".join(figures)}</div>' if charts else ""


def _section(section: Section, name: str) -> str:
    parts = [f'<section id="{name}"><h2>{escape(section.title)}</h2>']
    parts += [f"<p>{escape(line)}</p>" for line in section.prose]
    tables = [_table(table) for table in section.tables]
    if section.folds and tables[1:]:
        more = f"<details><summary>More tables</summary>{''.join(tables[1:])}</details>"
        tables = [tables[0], more]
    parts += tables
    if section.terms:
        terms = (
            f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in section.terms
        )
        parts.append(f"<dl>{''.join(terms)}</dl>")
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    heads = "".join(
        f'<th scope="col"{_class(table, i)}>{escape(name)}</th>'
        for i, name in enumerate(table.columns)
    )
    rows = "".join(_row(row, table, i in table.best) for i, row in enumerate(table.rows))
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    kind = "" if table.has_sentences else ' class="sorts"'
    note = f'<p class="quiet">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="wide" tabindex="0"><table{kind}>{caption}<thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _row(row: Sequence[Cell | str], table: Table, is_best: bool) -> str:
    first, *rest = row
    name = escape(cell_text(first))
    cells = [f'<th scope="row" title="{name}">{_BREAK.sub("<wbr>", name)}</th>']
    for i, cell in enumerate(rest, start=1):
        value = cell.value if isinstance(cell, Cell) else None
        sort = f' data-value="{value!r}"' if value is not None else ""
        sort = ' data-value=""' if cell_text(cell) == "-" and not sort else sort
        cells.append(f"<td{sort}{_class(table, i)}>{escape(cell_text(cell))}</td>")
    best = ' class="best"' if is_best else ""
    return f"<tr{best}>{''.join(cells)}</tr>"


def _class(table: Table, column: int) -> str:
    """The class of a column: sentences, words or figures."""
    if table.has_sentences:
        return ' class="words"'
    return ' class="text"' if table.is_text(column) else ""
