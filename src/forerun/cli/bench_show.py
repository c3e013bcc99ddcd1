"""Output of `forerun bench`: progress, run summary, comparison, step profile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.bench import metrics
from forerun.bench.disturbance import disturbed, undisturbed
from forerun.bench.formatting import factor, number, part_of, span
from forerun.bench.ranking import finished, left_out_line, skipped
from forerun.bench.scoring import last_line, pass_at_ks
from forerun.cli.loading import SLOW_SECONDS
from forerun.cli.output import console, notice
from forerun.utils.text import counted, time_left

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from forerun.bench.compare import Comparison
    from forerun.bench.progress import Progress
    from forerun.bench.results import Manifest, Record
    from forerun.bench.step_breakdown import StepBreakdown


LINE_INTERVAL_S = 10.0  # without a terminal
BAR_INTERVAL_S = 0.1


class Ticker:
    """Progress on stderr: a bar on a terminal, else one line per record."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        err = console(stderr=True)
        self._is_live = err.is_terminal
        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
        # no refresh thread, which would disturb the measurements
        self._bar = Progress(
            *columns, console=err, transient=True, auto_refresh=False, disable=not self._is_live
        )
        self._task = self._bar.add_task("starting", total=None)
        self._due = time.monotonic() + SLOW_SECONDS  # time of the next `choosing` message

    def __enter__(self) -> Ticker:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def __call__(self, record: Record, progress: Progress) -> None:
        """Shows a new record."""
        text = f"{record_line(record)}, {time_left(progress.eta)}"
        self._bar.update(
            self._task,
            description=text,
            completed=progress.done,
            total=progress.total,
            refresh=True,
        )
        if not self._is_live:
            notice(f"{progress.done}/{progress.total} {text}")
        elif record.error is not None:
            self.say(record_line(record))

    def choosing(self, name: str, done: int, total: int) -> None:
        """Shows how many prompts of a task have been read, at intervals."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + (BAR_INTERVAL_S if self._is_live else LINE_INTERVAL_S)
        text = f"choosing prompts of {name}"
        self._bar.update(self._task, description=text, completed=done, total=total, refresh=True)
        if not self._is_live:
            notice(f"{done}/{total} {text}")

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._is_live:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            notice(text)


def record_line(record: Record) -> str:
    """One line on a record."""
    kind = metrics.category_name(record.category)
    head = f"{record.task} {record.index} ({kind}) {record.method}: "
    if record.error is not None:
        return head + "failed: " + last_line(record.error)
    rate = metrics.tokens_per_second([record])
    tau = metrics.totals(record.samples).tau
    return head + f"{number(rate or 0.0)} tokens/s" + (f", tau {tau:.2f}" if tau else "")


def summary(manifest: Manifest, records: list[Record]) -> dict[str, Any]:
    """Figures per task and method, and notes; plain values."""
    from forerun.bench.alerts import alerts, single_prompt, truncated_answers

    timed = undisturbed(records)
    tasks, notes = {}, []
    for task in manifest.tasks:
        mine, quiet = ([r for r in rs if r.task == task] for rs in (records, timed))
        if line := truncated_answers(manifest, mine):
            notes.append(f"{task}: {line}")
        tasks[task] = {method: figures(mine, quiet, method) for method in manifest.methods}
        for method, figure in tasks[task].items():
            found = pass_at_ks(manifest, task, [r for r in mine if r.method == method])
            figure["pass_at_k"] = {str(k): value for k, value in found.items()}
    prompts = {
        task: [
            figure["speed_up"]["prompts"]
            for method, figure in found.items()
            if figure["speed_up"] and method != metrics.PLAIN
        ]
        for task, found in tasks.items()
    }
    return {
        "tasks": tasks,
        "rounds": manifest.rounds,
        "disturbed": sum(disturbed(records)),
        "limits": manifest.limits,
        "cost_curve": manifest.cost_curve,
        "left_out": skipped(manifest),
        "notes": notes + alerts(manifest, records) + single_prompt(prompts),
    }


def figures(records: list[Record], timed: list[Record], method: str) -> dict[str, Any]:
    """Speed, speed-up, tau, rates, accuracy and failures of one method; plain values.

    timed: the records that count in times.
    """
    mine, quiet, plain = (
        [r for r in some if r.method == name]
        for some, name in ((records, method), (timed, method), (timed, metrics.PLAIN))
    )
    found, compared = metrics.totals(metrics.samples_of(mine)), metrics.compared(quiet, plain)
    speed_ups = {}
    for name, prefill in (("speed_up", True), ("speed_up_without_prefill", False)):
        up = metrics.speed_up(timed, method, prefill=prefill)
        speed_ups[name] = up and {
            "ratio": up.ratio, "interval": up.interval, "prompts": up.prompts
        }  # fmt: skip
    return speed_ups | {
        "prompts": len(finished(mine)),
        "prompts_timed": len(finished(compared)),
        "measured": sum(record.error is None for record in mine),
        "failed": sum(record.error is not None for record in mine),
        "tokens_per_second": metrics.tokens_per_second(compared),
        "tau": found.tau,
        "acceptance_rate": found.acceptance_rate,
        "examined_rate": found.examined_rate,
        "per_position": found.per_position,
        "time": metrics.time_split(compared),
        "score": metrics.mean_score(mine),
        "majority": metrics.mean_score(mine, "majority"),
    }


COLUMNS = (
    "method", "prompts", "tokens/s", "speed-up", "95 % interval", "without prefill", "tau",
    "A/D", "outside pass", "one", "majority", "failed",
)  # fmt: skip
LEGEND = (
    "tau: tokens per pass; A/D: accepted of drafted tokens; outside pass: share of time outside "
    "the model's passes; one: mean score of single answers; majority: score of the commonest answer"
)


def show_summary(out: Console, manifest: Manifest, records: list[Record]) -> None:
    """One table per task of the methods that were measured, what was left out, and warnings."""
    from forerun.bench.report_summary import model_name

    found = summary(manifest, records)
    for task, methods in found["tasks"].items():
        threads = counted(manifest.threads, "thread")
        title = f"{task}, {model_name(manifest)}, {manifest.dtype}, {threads}"
        title += f", {manifest.rounds} rounds" if manifest.rounds > 1 else ""
        most = max((int(k) for one in methods.values() for k in one["pass_at_k"]), default=0)
        columns = (*COLUMNS[:-1], f"pass@{most}", COLUMNS[-1]) if most else COLUMNS
        rows = [
            _row(method, figure, most) for method, figure in methods.items() if figure["prompts"]
        ]
        if rows:
            out.print(make_table(title, columns, rows))
        if absent := left_out_line(manifest, [r for r in records if r.task == task]):
            out.print(absent if rows else f"{task}: {absent}", markup=False, soft_wrap=True)
    out.print(LEGEND, markup=False, soft_wrap=True)
    for name, why in found["left_out"].items():
        if any(methods[name]["prompts"] for methods in found["tasks"].values()):
            out.print(f"{name} was stopped: {last_line(why)}", markup=False, soft_wrap=True)
    for note in found["notes"]:
        out.print(note, markup=False, soft_wrap=True)


def _row(method: str, figure: dict[str, Any], most: int = 0) -> list[str]:
    """The cells of a method; most: k of the pass@k column, 0 for none."""
    up, bare = figure["speed_up"], figure["speed_up_without_prefill"]
    rate = figure["tokens_per_second"]
    return [
        method,
        part_of(figure["prompts_timed"], figure["prompts"]),
        "-" if rate is None else number(rate),
        factor(up["ratio"]) if up else "-",
        span(*up["interval"]) if up and up["interval"] and method != metrics.PLAIN else "-",
        factor(bare["ratio"]) if bare else "-",
        shown(figure["tau"], ".2f"),
        shown(figure["acceptance_rate"], ".0%"),
        shown(outside_share(figure["time"]), ".0%"),
        shown(figure["score"], ".0%"),
        shown(figure["majority"], ".0%"),
        *([shown(figure["pass_at_k"].get(str(most)), ".0%")] if most else []),
        str(figure["failed"] or ""),
    ]


def outside_share(time: dict[str, float]) -> float | None:
    """Share of wall time outside the target's pass."""
    total = sum(time.values())
    return 1 - time["forward"] / total if total else None


def shown(value: float | None, form: str, unit: str = "") -> str:
    """A number, or a dash if unknown."""
    return "-" if value is None else f"{value:{form}}{unit}"


def show_comparison(out: Console, found: Comparison, max_slowdown: float, relative: bool) -> None:
    """One row per method, remarks, and the verdict."""
    rows = []
    for change in found.changes:
        interval = " to ".join(map(precise, change.interval or ())) or "-"
        ratio = precise(change.ratio)
        rows.append([change.method, str(change.prompts), ratio, interval, change.verdict])
    what = "speed-up over plain" if relative else "tokens per second"
    columns = "method", "prompts", "ratio", "95 % interval", ""
    if rows:
        out.print(make_table(f"{what}, second run over first", columns, rows))
    for remark in found.remarks:
        out.print(remark, markup=False)
    limit = 1 - max_slowdown
    is_below = any(change.ratio < limit for change in found.changes)
    verdict = f"{'a' if is_below else 'no'} ratio is below {limit:.3f}"
    if is_below and not found.is_slower:
        verdict += ", but not significantly; use more --examples or --rounds"
    if rows:
        out.print(f"slower: {verdict}" if found.is_slower else verdict, soft_wrap=True)
    for loss in found.losses:
        out.print(f"worse: {loss}", markup=False, soft_wrap=True)


def precise(value: float) -> str:
    """Three decimals; three significant digits below 0.1."""
    return f"{value:.3f}" if value >= 0.1 else number(value)


def show_breakdown(out: Console, found: StepBreakdown) -> None:
    """One row per part of a step, and the cost of the timers."""
    rows = [
        [
            line.name,
            f"{line.microseconds:.1f}",
            f"{line.share:.1%}",
            shown(line.calls, ".1f"),
            "more than 10 %" if line.is_flagged else "",
        ]
        for line in found.lines
    ]
    columns = "part", "microseconds", "share", "calls", ""
    out.print(make_table(f"a step, mean of {found.steps}", columns, rows))
    bare = found.bare_outside
    share = "" if bare is None else f", {bare:.1%} outside the target's pass (quote this share)"
    out.print(
        f"{found.bare_microseconds:.0f} microseconds a step without timers{share}; "
        f"{found.tokens / found.steps:.2f} tokens a step"
    )
    out.print(
        f"{found.step_microseconds:.0f} microseconds in the lines above, {found.outside_lines:.1%} "
        f"outside the pass; the timers' {found.timer_share:.1%} are subtracted"
    )
    for note in found.notes:
        out.print(note)


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table with the first column left-aligned."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
