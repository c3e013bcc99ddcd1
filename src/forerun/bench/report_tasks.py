"""The part of a report that is about tasks: who is how fast, what was accepted, where time went."""

from __future__ import annotations

import re

from forerun.bench import metrics
from forerun.bench.alerts import cut_answers
from forerun.bench.charts import Bar, Line, Stack, bars, lines, number, stacks
from forerun.bench.markdown import Cell, Chart, Section, Table
from forerun.bench.metrics import PLAIN, SpeedUp
from forerun.bench.pass_at_k import passes
from forerun.bench.ranking import Entry, Standing, counts, factor, finished, times
from forerun.bench.results import Manifest, examples_of
from forerun.bench.theory import Headroom
from forerun.utils.text import counted

_DIGITS = re.compile(r"([0-9]+)")
OPTIONAL = ("per position", "at best", "one sample", "majority")  # shown if anybody tells
MAX_POSITIONS = 12  # columns of acceptance by position
BY = {"own": "forerun", "plain": "baseline", "peer": "peer"}


def figure(value: float | None, unit: str = "") -> Cell:
    """A number that sorts; a dash for what is not known."""
    return Cell("-") if value is None else Cell(f"{number(value)}{unit}", value)


def percent(value: float | None) -> Cell:
    """A share in percent."""
    return Cell("-") if value is None else Cell(f"{100 * value:.1f} %", value)


def speed_chart(standing: Standing, title: str) -> Chart | None:
    """Speed-ups with intervals, fastest first; tokens per second if plain decoding did not run.

    None if nothing finished.
    """
    ranked = sorted((e for e in standing.entries if e.prompts), key=standing.pace, reverse=True)
    rows = [_bar(standing, entry) for entry in ranked if standing.pace(entry)]
    mark = 1.0 if standing.has_baseline else None
    return Chart(title, bars(title, rows, mark)) if rows else None


def _bar(standing: Standing, entry: Entry) -> Bar:
    note, pace = standing.places[entry.method], standing.pace(entry)
    whole = len(frozenset.union(*(e.finished for e in standing.entries)))
    if not standing.is_ranked(entry):
        note = f"{entry.prompts} of {counted(whole, 'prompt')}"
    has_interval = standing.has_baseline and entry.kind != "plain" and entry.speed
    interval = entry.speed.interval if has_interval and entry.speed else None
    said = faster(entry, entry.speed).text if standing.has_baseline else f"{number(pace)} tokens/s"
    return Bar(entry.method, pace, interval, said, entry.kind, note, note == "fastest")


def task_section(manifest: Manifest, standing: Standing, task: str) -> Section:
    """Everything about one task."""
    mine = standing.records
    samples = max((len(r.samples) for r in mine), default=0)
    charts = [
        _trajectory_chart(standing, task),
        _position_chart(standing, task),
        _split_chart(standing, task),
    ]
    tables = [
        speed_table(standing, task),
        _category_table(standing, task),
        _pass_table(manifest, standing, task),
        _trajectory_table(standing, task),
        _position_table(standing, task),
        _split_table(standing, task),
    ]
    prompts = len({r.index for r in mine})
    whole = examples_of(manifest.tasks[task])[1] or prompts
    told = (
        f"{prompts} of {counted(whole, 'prompt')}, "
        f"{counted(samples, 'sample')} each, {counted(manifest.rounds, 'round')}."
    )
    if left_out := manifest.tasks[task].get("left_out"):
        told += f" Too long for the context, and left out: {counted(left_out, 'prompt')}."
    if any(record.is_shared for record in mine):
        told += f" Own methods decoded a prompt at the same time, {manifest.turns} steps in turn."
    return Section(
        f"Task {task}",
        list(filter(None, [told, cut_answers(manifest, mine)])),
        [chart for chart in charts if chart],
        [table for table in tables if table.rows],
        folds=True,
    )  # fmt: skip


def speed_table(standing: Standing, task: str) -> Table:
    """Tokens per second, speed-ups, tau, rates and accuracy of every method."""
    found = [_speed_row(standing, entry) for entry in standing.entries]
    hidden = {name for name in OPTIONAL if all(row[name] == Cell("-") for row in found)}
    if {e.timed_prompts for e in standing.entries} == {len(finished(standing.records))}:
        hidden.add("prompts")
    columns = [name for name in found[0] if name not in hidden]
    best = [standing.places.get(entry.method) == "fastest" for entry in standing.entries]
    return Table(
        f"{task}: speed and acceptance",
        columns,
        [[row[name] for name in columns] for row in found],
        frozenset(i for i, is_best in enumerate(best) if is_best),
    )


def _speed_row(standing: Standing, entry: Entry) -> dict[str, Cell | str]:
    totals, head = entry.totals, Headroom.of(entry.records)
    return {
        "method": entry.method,
        "by": BY[entry.kind],
        "place": standing.places.get(entry.method, ""),
        "tokens/s": figure(entry.rate),
        "speed-up": faster(entry, entry.speed),
        "without prefill": faster(entry, entry.bare),
        "tau": figure(totals.tau),
        "A/D": percent(totals.acceptance_rate),
        "A/E": percent(totals.examined_rate),
        "per position": percent(head.acceptance),
        "at best": percent(head.optimum),
        "one sample": percent(metrics.mean_score(entry.records)),
        "majority": percent(metrics.mean_score(entry.records, "majority")),
        "prompts": Cell(counts(entry.timed_prompts, entry.prompts), entry.timed_prompts),
    }


def faster(entry: Entry, speed: SpeedUp | None) -> Cell:
    """A speed-up as a cell; the baseline has no interval over itself."""
    if entry.method == PLAIN and speed:
        return Cell(factor(speed.ratio), speed.ratio)
    return Cell(times(speed), speed.ratio if speed else None)


def _category_table(standing: Standing, task: str) -> Table:
    """Speed-ups by level or category, where there is more than one."""
    names = sorted({r.category for r in standing.timed}, key=_natural)
    if len(names) < 2 or not standing.has_baseline:
        return Table("", [], [])
    rows: list[list[Cell | str]] = []
    for entry in standing.entries:
        parts = [[r for r in standing.timed if r.category == name] for name in names]
        found = [metrics.speed_up(part, entry.method) for part in parts]
        rows.append([entry.method, *(faster(entry, speed) for speed in found)])
    heads = map(metrics.kind_name, names)
    return Table(f"{task}: speed-up by level or category", ["method", *heads], rows)


def _pass_table(manifest: Manifest, standing: Standing, task: str) -> Table:
    """pass@k of every method, where answers are right or wrong and there are several."""
    found = {e.method: passes(manifest, task, e.records) for e in standing.entries}
    known = {method: values for method, values in found.items() if values}
    steps = sorted({k for values in known.values() for k in values})
    rows: list[list[Cell | str]] = [
        [method, *(percent(values.get(k)) for k in steps)] for method, values in known.items()
    ]
    return Table(f"{task}: pass@k", ["method", *(f"pass@{k}" for k in steps)], rows)


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders "level 2" before "level 10"."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in _DIGITS.split(name)]


def _drafting(standing: Standing) -> list[Entry]:
    """Methods that draft and tell how often."""
    return [e for e in standing.entries if e.totals.passes and e.totals.drafted]


def _taus(entry: Entry) -> dict[str, float]:
    found = metrics.by_trajectory(entry.records)
    return {name: totals.tau for name, totals in found.items() if totals.tau is not None}


def _trajectory_chart(standing: Standing, task: str) -> Chart | None:
    """tau over the number of the trajectory."""
    by_method = {e.method: _taus(e) for e in _drafting(standing)}
    names = list(dict.fromkeys(name for taus in by_method.values() for name in taus))
    if len(names) < 2:
        return None
    series = [
        Line(method, [(float(names.index(name)), tau) for name, tau in taus.items()])
        for method, taus in by_method.items()
    ]
    title = f"{task}: tau by trajectory"
    places = {float(i): name for i, name in enumerate(names)}
    return Chart(title, lines(title, series, "trajectory of a prompt", "tokens per pass", places))


def _trajectory_table(standing: Standing, task: str) -> Table:
    by_method = {e.method: _taus(e) for e in _drafting(standing)}
    names = list(dict.fromkeys(name for taus in by_method.values() for name in taus))
    rows: list[list[Cell | str]] = [
        [method, *(figure(taus.get(name)) for name in names)] for method, taus in by_method.items()
    ]
    return Table(f"{task}: tau by trajectory", ["method", *names], rows if len(names) > 1 else [])


def _position_chart(standing: Standing, task: str) -> Chart | None:
    """Acceptance over the position in the draft."""
    series = [
        Line(method, [(i, 100 * rate) for i, rate in enumerate(found, 1)])
        for method, found in _rates(standing).items()
    ]
    if not series:
        return None
    title = f"{task}: acceptance by position"
    return Chart(title, lines(title, series, "position in the draft", "% of passes"))


def _rates(standing: Standing) -> dict[str, list[float]]:
    found = {e.method: e.totals.per_position[:MAX_POSITIONS] for e in _drafting(standing)}
    return {method: rates for method, rates in found.items() if rates}


def _position_table(standing: Standing, task: str) -> Table:
    rates = _rates(standing)
    deepest = max(map(len, rates.values()), default=0)
    rows: list[list[Cell | str]] = [
        [method, *map(percent, found), *([Cell("-")] * (deepest - len(found)))]
        for method, found in rates.items()
    ]
    columns = ["method", *map(str, range(1, deepest + 1))]
    return Table(f"{task}: accepted at position i over passes", columns, rows)


def _splits(standing: Standing) -> dict[str, dict[str, float]]:
    found = {e.method: metrics.time_split(e.compared) for e in standing.entries}
    return {method: split for method, split in found.items() if split}


def _split_chart(standing: Standing, task: str) -> Chart | None:
    """Shares of the time of drafting, the target's pass, verifying and the rest."""
    splits = _splits(standing)
    if not splits:
        return None
    names = list(next(iter(splits.values())))
    rows = [Stack(m, [split.get(name, 0.0) for name in names]) for m, split in splits.items()]
    title = f"{task}: where the time goes"
    return Chart(title, stacks(title, rows, names))


def _split_table(standing: Standing, task: str) -> Table:
    splits = _splits(standing)
    sizes = {e.method: sum(map(metrics.tells_parts, e.compared)) for e in standing.entries}
    names = list(next(iter(splits.values()))) if splits else []
    rows: list[list[Cell | str]] = []
    for method, split in splits.items():
        whole, num = sum(split.values()), sizes[method]
        shares = [percent(metrics.ratio(split.get(name), whole)) for name in names]
        rows.append([method, *shares, figure(metrics.ratio(whole, num))])
    return Table(f"{task}: where the time goes", ["method", *names, "s per prompt"], rows)
