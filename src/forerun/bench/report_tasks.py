"""Report section of a task: speed, acceptance, accuracy, pass@k, where the time goes."""

from __future__ import annotations

import re

from forerun.bench import metrics
from forerun.bench.alerts import truncated_answers
from forerun.bench.charts import Bar, bars
from forerun.bench.formatting import factor, number, part_of, times
from forerun.bench.metrics import PLAIN, SpeedUp, Totals
from forerun.bench.ranking import Entry, Ranking, finished, left_out_line
from forerun.bench.report_markdown import Cell, Section, Table
from forerun.bench.results import Manifest, num_examples
from forerun.bench.scoring import pass_at_ks
from forerun.bench.theory import Headroom
from forerun.utils.text import counted

_DIGITS = re.compile(r"([0-9]+)")
OPTIONAL = ("per position", "at best", "one sample", "majority")  # hidden if all are unknown
MAX_POSITIONS = 12  # columns of acceptance by position
KIND_NAMES = {"own": "forerun", "plain": "baseline", "peer": "peer"}

Rows = list[list[Cell | str]]


def figure(value: float | None) -> Cell:
    """A sortable number; a dash if unknown."""
    return Cell("-") if value is None else Cell(number(value), value)


def percent(value: float | None) -> Cell:
    """A share in percent; a dash if unknown."""
    return Cell("-") if value is None else Cell(f"{100 * value:.1f} %", value)


def speed_cell(entry: Entry, speed: SpeedUp | None) -> Cell:
    """A speed-up with its interval; plain decoding over itself has none."""
    if speed is None:
        return Cell("-")
    text = factor(speed.ratio) if entry.method == PLAIN else times(speed)
    return Cell(text, speed.ratio)


def speed_chart(ranking: Ranking, title: str) -> str:
    """SVG of speed-ups with intervals, fastest first; tokens per second without a baseline.

    "" if nothing finished.
    """
    entries = sorted((e for e in ranking.entries if e.prompts), key=ranking.score, reverse=True)
    rows = [_bar(ranking, entry) for entry in entries if ranking.score(entry)]
    return bars(title, rows, 1.0 if ranking.has_baseline else None) if rows else ""


def _bar(ranking: Ranking, entry: Entry) -> Bar:
    note, score, interval = ranking.places[entry.method], ranking.score(entry), None
    if not ranking.is_ranked(entry):
        total = len(frozenset.union(*(e.finished for e in ranking.entries)))
        note = f"{entry.prompts} of {counted(total, 'prompt')}"
    text = f"{number(score)} tokens/s"
    if ranking.has_baseline:
        text = speed_cell(entry, entry.speed).text
        interval = entry.speed.interval if entry.speed and entry.kind != "plain" else None
    return Bar(entry.method, score, interval, text, entry.kind, note, note == "fastest")


def task_section(manifest: Manifest, ranking: Ranking, task: str) -> Section:
    """All tables of one task."""
    tables = [
        speed_table(manifest, ranking, task),
        _category_table(ranking, task),
        _pass_table(manifest, ranking, task),
        _trajectory_table(ranking, task),
        _position_table(ranking, task),
        _time_table(ranking, task),
    ]
    prose = _task_facts(manifest, ranking, task)
    if not ranking.measured:
        prose.append(left_out_line(manifest, ranking.records))
    return Section(
        f"Task {task}",
        prose,
        [table for table in tables if table.rows],
        folds=True,
    )


def _task_facts(manifest: Manifest, ranking: Ranking, task: str) -> list[str]:
    records = ranking.records
    prompts = len({r.index for r in records})
    samples = max((len(r.samples) for r in records), default=0)
    total = num_examples(manifest.tasks[task])[1] or prompts
    text = (
        f"{prompts} of {counted(total, 'prompt')}, {counted(samples, 'sample')} each, "
        f"{counted(manifest.rounds, 'round')}."
    )
    if too_long := manifest.tasks[task].get("left_out"):
        text += f" Too long for the context: {counted(too_long, 'prompt')}."
    if any(record.is_shared for record in records):
        text += f" Local methods alternated every {manifest.turns} steps."
    return list(filter(None, [text, truncated_answers(manifest, records)]))


def speed_table(manifest: Manifest, ranking: Ranking, task: str) -> Table:
    """Tokens per second, speed-ups, tau, rates and accuracy of the methods that were measured."""
    rows = [_speed_row(ranking, entry) for entry in ranking.measured]
    hidden = {name for name in OPTIONAL if all(row[name] == Cell("-") for row in rows)}
    if {e.timed_prompts for e in ranking.measured} == {len(finished(ranking.records))}:
        hidden.add("prompts")
    columns = [name for row in rows[:1] for name in row if name not in hidden]
    best = [ranking.places.get(entry.method) == "fastest" for entry in ranking.measured]
    return Table(
        f"{task}: speed and acceptance",
        columns,
        [[row[name] for name in columns] for row in rows],
        frozenset(i for i, is_best in enumerate(best) if is_best),
        note=left_out_line(manifest, ranking.records),
    )


def _speed_row(ranking: Ranking, entry: Entry) -> dict[str, Cell | str]:
    totals, head = entry.totals, Headroom.of(entry.records)
    return {
        "method": entry.method,
        "by": KIND_NAMES[entry.kind],
        "place": ranking.places.get(entry.method, ""),
        "tokens/s": figure(entry.rate),
        "speed-up": speed_cell(entry, entry.speed),
        "without prefill": speed_cell(entry, entry.decode_speed),
        "tau": figure(totals.tau),
        "A/D": percent(totals.acceptance_rate),
        "A/E": percent(totals.examined_rate),
        "per position": percent(head.acceptance),
        "at best": percent(head.optimum),
        "one sample": percent(metrics.mean_score(entry.records)),
        "majority": percent(metrics.mean_score(entry.records, "majority")),
        "prompts": Cell(part_of(entry.timed_prompts, entry.prompts), entry.timed_prompts),
    }


def _category_table(ranking: Ranking, task: str) -> Table:
    """Speed-ups by level or category, if there is more than one."""
    names = sorted({r.category for r in ranking.timed}, key=_natural)
    if len(names) < 2 or not ranking.has_baseline:
        return Table("", [], [])
    rows: Rows = []
    for entry in ranking.measured:
        parts = [[r for r in ranking.timed if r.category == name] for name in names]
        speeds = [metrics.speed_up(part, entry.method) for part in parts]
        rows.append([entry.method, *(speed_cell(entry, speed) for speed in speeds)])
    heads = map(metrics.category_name, names)
    return Table(f"{task}: speed-up by level or category", ["method", *heads], rows)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts "level 2" before "level 10"."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in _DIGITS.split(name)]


def _pass_table(manifest: Manifest, ranking: Ranking, task: str) -> Table:
    """pass@k of every method, for pass-or-fail tasks with several samples."""
    found = {e.method: pass_at_ks(manifest, task, e.records) for e in ranking.entries}
    steps = sorted({k for values in found.values() for k in values})
    rows: Rows = [
        [method, *(percent(values.get(k)) for k in steps)]
        for method, values in found.items()
        if values
    ]
    return Table(f"{task}: pass@k", ["method", *(f"pass@{k}" for k in steps)], rows)


def _drafting(ranking: Ranking) -> list[Entry]:
    """Methods that draft and report their passes."""
    return [e for e in ranking.entries if e.totals.passes and e.totals.drafted]


def _trajectory_table(ranking: Ranking, task: str) -> Table:
    """tau by the number of the trajectory."""
    groups: dict[str, dict[str, Totals]] = {
        e.method: metrics.by_trajectory(e.records) for e in _drafting(ranking)
    }
    names = list(dict.fromkeys(name for by_name in groups.values() for name in by_name))
    rows: Rows = [
        [method, *(figure(by_name[n].tau if n in by_name else None) for n in names)]
        for method, by_name in groups.items()
    ]
    return Table(f"{task}: tau by trajectory", ["method", *names], rows if len(names) > 1 else [])


def _position_table(ranking: Ranking, task: str) -> Table:
    rates = {e.method: e.totals.per_position[:MAX_POSITIONS] for e in _drafting(ranking)}
    deepest = max(map(len, rates.values()), default=0)
    rows: Rows = [
        [method, *map(percent, found), *([Cell("-")] * (deepest - len(found)))]
        for method, found in rates.items()
        if found
    ]
    columns = ["method", *map(str, range(1, deepest + 1))]
    return Table(f"{task}: accepted at position i over passes", columns, rows)


def _time_table(ranking: Ranking, task: str) -> Table:
    """Shares of drafting, the target's pass, verification and the rest."""
    splits = {e.method: metrics.time_split(e.compared) for e in ranking.entries}
    names = list(next((split for split in splits.values() if split), ()))
    counts = {e.method: sum(map(metrics.has_time_parts, e.compared)) for e in ranking.entries}
    rows: Rows = []
    for method, split in splits.items():
        if split:
            total = sum(split.values())
            shares = [percent(metrics.ratio(split.get(name), total)) for name in names]
            rows.append([method, *shares, figure(metrics.ratio(total, counts[method]))])
    return Table(f"{task}: where the time goes", ["method", *names, "s per prompt"], rows)
