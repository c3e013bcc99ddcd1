"""The part of a report that is about the machine: cost of a pass, memory, failures, terms."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from forerun.bench import metrics, theory
from forerun.bench.alerts import among
from forerun.bench.charts import Line, lines, number
from forerun.bench.markdown import Cell, Chart, Section, Table
from forerun.bench.ranking import factor, incomplete, kind_of, skipped, times
from forerun.bench.report_tasks import figure, percent
from forerun.bench.results import Manifest, Record
from forerun.bench.roofline import after_prompts, mean_context, roofline_fraction
from forerun.bench.theory import PassCost
from forerun.core.sampling import Sampling
from forerun.utils.text import counted

APART = 1.5  # how far a pass of one row may be from that of the cost curve
ALWAYS = ("temperature", "top_k", "top_p", "n", "max_new_tokens")

DEFINITIONS = (
    ("S, D, A, E, G", "verify passes, drafted tokens, accepted draft tokens, examined tokens, "
     "generated tokens"),
    ("tau", "G / S, the correction or bonus token counted; plain decoding has 1"),
    ("A/D", "acceptance rate: accepted over drafted"),
    ("A/E", "examined rate: accepted over examined, the accepted ones and one for every pass "
     "whose walk ended in a rejection"),
    ("per position, at best", "with --optimum: of the positions that had drafts, how many went on "
     "to one of them, and how many would have under the best rule for these drafts that judges "
     "positions one by one, on average: by chance fewer than did"),
    ("acceptance by position", "drafts accepted at depth i over S: unconditional, as in vLLM"),
    ("times that count", "those of records beside which the machine was not disturbed more than "
     "in the rest of the run; speeds and the split of time rest on them, all else on all records"),
    ("where the time goes", "of the records that the speeds rest on; s per prompt: all samples, a "
     "round"),
    ("prompts", "finished at least once; 9 of 10: those of them that the speeds rest on"),
    ("tokens/s", "generated tokens over wall time, prefill included, of the prompts and rounds "
     "that plain decoding has as well: those of the speed-up"),
    ("speed-up", "tokens per second over our own plain decoding on the same prompt; geometric mean "
     "over prompts, in brackets its 95 % interval over prompts: by bootstrap, below 10 prompts by "
     "Student's t of the logarithms"),
    ("without prefill", "the same, the passes that computed the prompt taken off on both sides"),
    ("fastest, tied", "fastest: the highest speed-up of those that finished the most prompts; "
     "tied: the interval of its speed over the fastest, prompt by prompt, holds 1, or that one "
     "drafted nothing, and this is plain decoding"),
    ("pass@k", "probability that at least one of k answers is right, without bias: with c "
     "of n right, 1 - C(n - c, k) / C(n, k); mean over prompts"),
    ("predicted tau", "1 + the sum of the rates by position"),
    ("c(N)", "time of a pass over N rows over that of one row"),
    ("roofline", "the shortest time of a pass: bytes of weights and keys and values over the "
     "measured reading speed, or operations over the measured product speed, whichever is longer; "
     "bytes as they are held: in 8 bits where they are rounded, with the zeros that fill them up"),
    ("predicted speed-up", "tau times c(1) over c(1 + D/S): what tau and the cost curve promise if "
     "nothing but the pass took time; not for passes that several sequences share"),
    ("memory-bound speed-up", "tau / (1 + k r), k draft passes per round that each read r of the "
     "target's parameters; equal to tau for drafters without a model"),
)  # fmt: skip


def cost_section(manifest: Manifest, records: Sequence[Record]) -> Section:
    """c(N), the roofline, how near we come to it, and what tau and c(N) promise."""
    limits = manifest.limits
    prose = []
    if {"read_gb_s", "gflop_s"} <= limits.keys():
        prose.append(
            f"Measured before the run: reading {number(limits['read_gb_s'])} GB/s, products "
            f"{number(limits['gflop_s'])} GFLOP/s in {manifest.dtype}.{_drift(records)}"
        )
    charts = [_cost_chart(manifest)] if manifest.cost_curve else []
    quiet = metrics.calm(records)
    tables = [_cost_table(manifest), _roofline_table(manifest, quiet)]
    tables.append(_prediction_table(manifest, records, quiet))
    prose += _contradiction(manifest, quiet)
    if any(cell.value and cell.value > 1 for cell in _shares(tables)):
        prose.append(_above(manifest))
    return Section("Cost of a pass, and theory", prose, charts, [t for t in tables if t.rows])


def _contradiction(manifest: Manifest, records: Sequence[Record]) -> list[str]:
    """What to make of a cost curve whose single row is not what plain decoding's passes took."""
    mine = [r for r in records if r.method == metrics.PLAIN]
    said, found = manifest.cost_curve.get("1"), after_prompts(mine)
    if not said or not found or 1 / APART <= said / found.mean_pass <= APART:
        return []
    return [
        f"The cost curve contradicts the run: it says {number(1e3 * said)} ms for one row after "
        f"{theory.CONTEXT} tokens, and plain decoding's own passes took "
        f"{number(1e3 * found.mean_pass)} ms after {number(mean_context(mine))}. Where the "
        "contexts do not explain that, the machine was busier at one of the two; c(N) and the "
        "predicted speed-ups are then not those of this run."
    ]


def _above(manifest: Manifest) -> str:
    """Why a share of the roofline exceeds 100 %."""
    cache, read = manifest.machine.get("cache_bytes"), manifest.model.get("pass_bytes")
    if cache and read and read <= cache:
        return (
            f"A share above 100 %: what a pass reads ({_plain('bytes', read)}) fits into the "
            f"processor's cache ({_plain('bytes', cache)}), which is faster than the memory that "
            "the roofline counts with."
        )
    busy = "A share above 100 % says that the limit was measured too low, as on a busy machine"
    return busy + ("." if cache else ", or that the weights lie in the processor's cache.")


def _shares(tables: Sequence[Table]) -> list[Cell]:
    """The cells under "roofline / ..."."""
    return [
        cell
        for table in tables
        for row in table.rows
        for name, cell in zip(table.columns, row, strict=True)
        if name.startswith("roofline /") and isinstance(cell, Cell)
    ]


def _drift(records: Sequence[Record]) -> str:
    """How far the reading speed, measured again and again, moved during the run."""
    found = metrics.beside(records, "read_gb_s")
    return f" Beside the prompts, reading was {among(found, number)} GB/s." if found else ""


def _roofline(manifest: Manifest, rows: int) -> float | None:
    """Seconds of a pass at the limits, in the context that the curve was measured in."""
    cost = PassCost.from_dict(manifest.model)
    if cost is None or not {"read_gb_s", "gflop_s"} <= manifest.limits.keys():
        return None
    return cost.roofline_seconds(manifest.limits, context=theory.CONTEXT, rows=rows)


def _cost_chart(manifest: Manifest) -> Chart:
    curve = [(float(n), 1e3 * manifest.cost_curve[n]) for n in sorted(manifest.cost_curve, key=int)]
    series = [Line("measured", curve)]
    floor = [(n, _roofline(manifest, int(n))) for n, _ in curve]
    if all(seconds is not None for _, seconds in floor):
        series.append(Line("roofline", [(n, 1e3 * s) for n, s in floor if s is not None]))
    title = "Cost of a pass over N rows"
    return Chart(title, lines(title, series, "rows N", "milliseconds", log_x=True))


def _cost_table(manifest: Manifest) -> Table:
    rows: list[list[Cell | str]] = []
    relative = theory.relative_cost(manifest.cost_curve)
    for n in sorted(map(int, manifest.cost_curve)):
        seconds, floor = manifest.cost_curve[str(n)], _roofline(manifest, n)
        share = metrics.ratio(floor, seconds)
        rows.append(
            [
                Cell(str(n), n),
                figure(1e3 * seconds),
                figure(relative.get(n)),
                figure(1e3 * floor if floor else None),
                percent(share),
            ]
        )
    columns = ["rows N", "pass, ms", "c(N)", "roofline, ms", "roofline / pass"]
    return Table("Cost curve", columns, rows)


def _roofline_table(manifest: Manifest, records: Sequence[Record]) -> Table:
    """How near the passes of our own methods come to the roofline."""
    rows: list[list[Cell | str]] = []
    for method in manifest.methods:
        found = roofline_fraction(manifest, records, method)
        if found is None:
            continue
        spent = (found.roofline_seconds, found.forward_seconds, found.step_seconds)
        shares = (found.of_forward, found.of_step)
        rows.append([method, *(figure(1e3 * s) for s in spent), *(percent(s) for s in shares)])
    columns = [
        "method",
        "roofline, ms",
        "pass, ms",
        "step, ms",
        "roofline / pass",
        "roofline / step",
    ]
    return Table("Fraction of the roofline, average pass of the run", columns, rows)


def _prediction_table(
    manifest: Manifest, records: Sequence[Record], timed: Sequence[Record]
) -> Table:
    """tau and speed-up as predicted from counts and the cost curve, beside what was measured."""
    rows: list[list[Cell | str]] = []
    for task in manifest.tasks:
        for method in manifest.methods:
            mine = [r for r in records if r.task == task and r.method == method]
            totals = metrics.totals(metrics.samples_of(mine))
            if not totals.passes or not totals.drafted:
                continue
            # the curve is that of our own passes over one sequence
            is_told = kind_of(method, manifest) == "own" and not metrics.at_once(method)
            promise = theory.predicted_speed_up(totals, manifest.cost_curve)
            speed = metrics.speed_up([r for r in timed if r.task == task], method, prefill=False)
            rows.append(
                [
                    f"{task}, {method}",
                    figure(totals.drafted / totals.passes),
                    figure(totals.predicted_tau if totals.per_position else None),
                    figure(totals.tau),
                    Cell(factor(promise), promise) if is_told and promise > 0 else Cell("-"),
                    Cell(times(speed), speed.ratio if speed else None),
                ]
            )
    columns = [
        "task, method", "D/S", "predicted tau", "tau", "predicted speed-up",
        "speed-up without prefill",
    ]  # fmt: skip
    return Table("Prediction beside measurement", columns, rows)


def memory_section(manifest: Manifest, records: Sequence[Record]) -> Section:
    """The largest sizes seen, by method and part."""
    peaks = {m: metrics.peak_memory(r for r in records if r.method == m) for m in manifest.methods}
    peaks = {method: peak for method, peak in peaks.items() if peak}
    parts = list(dict.fromkeys(part for peak in peaks.values() for part in peak))
    rows: list[list[Cell | str]] = [
        [method, *(figure(peak[part] / 1e6 if part in peak else None) for part in parts)]
        for method, peak in peaks.items()
    ]
    prose = [] if rows else ["No contestant told its memory."]
    if any(kind_of(method, manifest) != "peer" for method in peaks):
        prose.append(
            "Methods of forerun run on one model in one process: its weights, its cache with the "
            "slots that others left, and its scratch are there once, not once for each. A peer "
            "tells of its whole process."
        )
    table = Table("", ["MB", *parts], rows)
    return Section("Memory", prose, tables=[table] if rows else [])


def failure_section(manifest: Manifest, records: Sequence[Record]) -> Section:
    """Who was skipped and why; who broke, how often, and with what last lines."""
    ran = Counter(record.method for record in records)
    rows: list[list[Cell | str]] = [
        [name, f"left out after {counted(ran[name], 'prompt')}" if ran[name] else "skipped", why]
        for name, why in skipped(manifest).items()
    ]
    broke = Counter((r.method, r.task, r.error) for r in records if r.error is not None)
    for (method, task, error), count in broke.items():
        rows.append([method, f"failed on {count} of {task}", error or ""])
    table = Table("", ["method", "what", "why, or its last lines"], rows, words=True)
    if rows:
        return Section("Skipped and failed", tables=[table])
    if lacking := incomplete(manifest, records):
        return Section("Skipped and failed", [f"None so far, but {lacking}."])
    told = "None: every contestant started and finished every prompt it was given."
    return Section("Skipped and failed", [told])


def setup_section(manifest: Manifest) -> Section:
    """Model, machine, versions, seed, revision and command: what it takes to repeat the run."""
    facts: dict[str, Any] = {
        "command": manifest.command,
        "created": manifest.created,
        "forerun": f"{manifest.forerun}, revision {manifest.git or 'unknown'}",
        "number type, threads, seed": f"{manifest.dtype}, {manifest.threads}, {manifest.seed}",
        "sampling": _changed(manifest.sampling),
        **({"suite": manifest.suite} if manifest.suite else {}),
        **{f"model: {n}": value for n, value in manifest.model.items() if n != "path"},
        **{f"machine: {name}": value for name, value in manifest.machine.items()},
        **{f"peer: {n}": v for n, v in manifest.peers.items() if not isinstance(v, str)},
        **{f"memory of {name}": sizes for name, sizes in manifest.peer_memory.items()},
        **{f"task: {name}": value for name, value in manifest.tasks.items()},
        **{f"resumed {i}": one for i, one in enumerate(manifest.resumed, 1)},
    }
    rows = [[name, _plain(name, value)] for name, value in facts.items()]
    return Section("Setup", tables=[Table("", ["what", "value"], rows, words=True)])


def _changed(sampling: dict[str, Any]) -> dict[str, Any]:
    """What shapes the law, and the settings that are not the usual ones."""
    usual = json.loads(json.dumps(asdict(Sampling())))
    return {k: v for k, v in sampling.items() if k in ALWAYS or v != usual.get(k)}


def _plain(name: str, value: Any) -> str:
    """A value as people read it: sizes in MB or GB, pairs on one line."""
    if isinstance(value, dict):
        pairs = ((key, _plain(key, one)) for key, one in value.items() if one is not None)
        return ", ".join(f"{key} {one}" for key, one in pairs)
    is_size = name.endswith(("bytes", "memory", "bytes_per_token"))
    if not is_size or not isinstance(value, int):
        return f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)
    if value < 1e6:
        return f"{value:,} bytes"
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def definition_section() -> Section:
    """What the figures mean; the same words in every report."""
    return Section("Definitions", terms=DEFINITIONS)
