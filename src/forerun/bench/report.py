"""Builds the report of a run and writes it as `report.html` and `report.md`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forerun.bench import report_machine, results
from forerun.bench.alerts import alerts
from forerun.bench.disturbance import undisturbed
from forerun.bench.ranking import Ranking
from forerun.bench.report_html import to_html
from forerun.bench.report_markdown import Report, clean, to_markdown
from forerun.bench.report_summary import context, remarks, summary, tiles, title
from forerun.bench.report_tasks import speed_chart, task_section
from forerun.bench.results import Manifest, Record
from forerun.errors import DataError
from forerun.utils.files import write_whole

PAGE, MARKDOWN = "report.html", "report.md"
MAX_CHARTS = 6  # tasks with a chart of their own


def write_report(run_folder: str | Path) -> list[Path]:
    """Writes report.html and report.md into the run folder; returns their paths.

    Raises DataError for a folder without a readable run.
    """
    folder = results.run_folder(run_folder)
    manifest, records = results.read_run(folder)
    if not records:
        raise DataError(f"{folder} has no records yet; start or resume its `forerun bench run`")
    report = build(manifest, records)
    files = {PAGE: to_html(report), MARKDOWN: to_markdown(report)}
    for name, text in files.items():
        write_whole(folder / name, clean(text))
    return [folder / name for name in files]


def build(manifest: Manifest, records: Sequence[Record]) -> Report:
    """All contents of a report."""
    timed = undisturbed(records)
    ranking = Ranking(manifest, records, timed)
    by_task = {
        task: Ranking(manifest, *([r for r in rs if r.task == task] for rs in (records, timed)))
        for task in manifest.tasks
        if any(r.task == task for r in records)
    }
    return Report(
        title(manifest),
        tiles(ranking),
        summary(ranking, by_task),
        context(manifest),
        alerts(manifest, records),
        remarks(manifest, ranking, by_task),
        _charts(ranking, by_task),
        [
            *(task_section(manifest, one, task) for task, one in by_task.items()),
            report_machine.cost_section(manifest, records),
            report_machine.memory_section(manifest, records),
            report_machine.failure_section(manifest, records),
            report_machine.setup_section(manifest),
            report_machine.definition_section(),
        ],
    )


def _charts(ranking: Ranking, by_task: dict[str, Ranking]) -> list[tuple[str, str]]:
    """Speeds over all tasks, and of the first tasks."""
    measure = "Speed over our plain decoding" if ranking.has_baseline else "Tokens per second"
    named = dict(list(by_task.items())[:MAX_CHARTS])
    if len(by_task) > 1:
        named = {"all tasks": ranking} | named
    charts = [(f"{measure}, {name}", one) for name, one in named.items()]
    return [(title, svg) for title, one in charts if (svg := speed_chart(one, title))]
