"""The report of a run: one HTML page that needs nothing else, its Markdown twin, and a picture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from forerun.bench import report_setup as setup
from forerun.bench import results
from forerun.bench.alerts import alerts
from forerun.bench.charts import DEFS, STYLE, standalone
from forerun.bench.headline import context, headline, remarks, tiles, title
from forerun.bench.markdown import Cell, Chart, Report, Section, Table, clean, render, shown
from forerun.bench.metrics import calm
from forerun.bench.ranking import Standing
from forerun.bench.report_tasks import speed_chart, task_section
from forerun.bench.results import Manifest, Record
from forerun.errors import DataError
from forerun.utils.files import write_whole

PAGE, MARKDOWN, PICTURE = "report.html", "report.md", "report.svg"
_JOINT = re.compile(r"(?<=[:,+/])(?=.)")  # where a long name of a method may go on in another line
MAX_PICTURES = 6  # tasks with a chart of their own at the top


def write_report(run_folder: str | Path) -> list[Path]:
    """Writes report.html, report.md and the first picture into the run folder; returns all.

    Raises DataError for a folder without a run or with one that cannot be read.
    """
    run_folder = results.run_folder(run_folder)
    manifest, records = results.read_run(run_folder)
    _check(run_folder, records)
    report = build(manifest, records)
    files = {PAGE: page(report), MARKDOWN: render(report, PICTURE)}
    if report.pictures:
        first = report.pictures[0]
        files[PICTURE] = standalone(first.title, first.svg)
    for name, text in files.items():
        write_whole(run_folder / name, clean(text))
    return [run_folder / name for name in files]


def build(manifest: Manifest, records: Sequence[Record]) -> Report:
    """All contents of a report, from the functions of `metrics`, `theory` and `roofline` only."""
    timed = calm(records)
    everything = Standing(manifest, records, timed)
    tasks = [task for task in manifest.tasks if any(r.task == task for r in records)]
    by_task = {
        task: Standing(
            manifest, *([r for r in some if r.task == task] for some in (records, timed))
        )
        for task in tasks
    }
    return Report(
        title(manifest),
        tiles(everything),
        headline(everything, by_task),
        context(manifest),
        alerts(manifest, records),
        remarks(manifest, everything, by_task),
        _pictures(everything, by_task),
        [
            *(task_section(manifest, by_task[task], task) for task in tasks),
            setup.cost_section(manifest, records),
            setup.memory_section(manifest, records),
            setup.failure_section(manifest, records),
            setup.setup_section(manifest),
            setup.definition_section(),
        ],
    )


def _pictures(everything: Standing, by_task: dict[str, Standing]) -> list[Chart]:
    """Speeds over all tasks, and task by task; of many tasks, the first ones."""
    measure = "Speed over our plain decoding" if everything.has_baseline else "Tokens per second"
    named = dict(list(by_task.items())[:MAX_PICTURES])
    if len(by_task) > 1:
        named = {"all tasks": everything} | named
    charts = [speed_chart(one, f"{measure}, {name}") for name, one in named.items()]
    return [chart for chart in charts if chart]


def _check(folder: Path, records: Sequence[Record]) -> None:
    """Raises DataError where there is nothing to report."""
    if not records:
        raise DataError(
            f"{folder} has no records yet; start or resume its `forerun bench run`, "
            "and report after the first prompt"
        )


def page(report: Report) -> str:
    """The report as one HTML page; all text of records is escaped."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    named = list(enumerate(report.sections))
    links = "".join(f'<a href="#part{i}">{_html(part.title)}</a>' for i, part in named)
    body = [
        f"<header><h1>{_html(report.title)}</h1>",
        f'<p class="quiet">{_html(report.context)}</p>',
        *(f'<p class="alert" role="alert">{_html(line)}</p>' for line in report.alerts),
        _tiles(report.tiles),
        f"{_list(report.headline)}</header>",
        f"<main>{_charts(report.pictures)}{_list(report.remarks, 'quiet')}",
        f'<nav aria-label="Contents">{links}</nav>',
        *(_section(part, f"part{i}") for i, part in named),
        "</main>",
    ]
    return Template(template).substitute(
        title=_html(report.title), style=STYLE, defs=DEFS, body="\n".join(body)
    )


def _html(words: str) -> str:
    return escape(words, quote=True)


def _list(lines: Sequence[str], kind: str = "") -> str:
    items = "".join(f"<li>{_html(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _tiles(tiles: Sequence[tuple[str, str]]) -> str:
    cells = (f"<div><dt>{_html(words)}</dt><dd>{_html(value)}</dd></div>" for value, words in tiles)
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _charts(charts: Sequence[Chart]) -> str:
    if not charts:
        return ""
    figures = (
        f"<figure><figcaption>{_html(chart.title)}</figcaption>{chart.svg}</figure>"
        for chart in charts
    )
    return f'<div class="charts">{"".join(figures)}</div>'


def _section(section: Section, name: str) -> str:
    parts = [f'<section id="{name}"><h2>{_html(section.title)}</h2>']
    parts += [f"<p>{_html(line)}</p>" for line in section.prose]
    tables = [_table(table) for table in section.tables]
    charts = _charts(section.charts)
    if section.folds and tables[1:]:
        more = f"<details><summary>The same and more in figures</summary>{''.join(tables[1:])}"
        parts += [tables[0], charts, f"{more}</details>"]
    else:
        parts += [charts, *tables]
    if section.terms:
        terms = (f"<dt>{_html(term)}</dt><dd>{_html(words)}</dd>" for term, words in section.terms)
        parts.append(f"<dl>{''.join(terms)}</dl>")
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    heads = "".join(
        f'<th scope="col"{_kind(table, i)}>{_html(name)}</th>'
        for i, name in enumerate(table.columns)
    )
    rows = "".join(_row(row, table, i in table.best) for i, row in enumerate(table.rows))
    caption = f"<caption>{_html(table.title)}</caption>" if table.title else ""
    kind = "" if table.words else ' class="sorts"'
    return (
        f'<div class="wide" tabindex="0"><table{kind}>{caption}<thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(row: Sequence[Cell | str], table: Table, is_best: bool) -> str:
    first, *rest = row
    best = ' class="best"' if is_best else ""
    name = _html(shown(first))
    cells = [f'<th scope="row" title="{name}">{_JOINT.sub("<wbr>", name)}</th>']
    for i, cell in enumerate(rest, start=1):
        value = cell.value if isinstance(cell, Cell) else None
        sort = f' data-value="{value!r}"' if value is not None else ""
        empty = ' data-value=""' if shown(cell) == "-" else ""
        cells.append(f"<td{sort or empty}{_kind(table, i)}>{_html(shown(cell))}</td>")
    return f"<tr{best}>{''.join(cells)}</tr>"


def _kind(table: Table, column: int) -> str:
    """The class of a column's cells: sentences, words, or figures."""
    if table.words:
        return ' class="words"'
    return ' class="text"' if table.is_text(column) else ""
