"""Report sections on cost of a pass, memory, failures, set-up and definitions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from forerun.bench import metrics, theory
from forerun.bench.disturbance import limits_of, undisturbed
from forerun.bench.formatting import factor, number, times, value_range
from forerun.bench.ranking import incomplete, kind_of, skipped
from forerun.bench.report_markdown import Cell, Section, Table
from forerun.bench.report_tasks import Rows, figure, percent
from forerun.bench.results import Manifest, Record
from forerun.bench.roofline import roofline_fraction
from forerun.bench.theory import PassCost
from forerun.core.sampling import Sampling
from forerun.utils.text import counted

MAIN_SAMPLING = ("temperature", "top_k", "top_p", "n", "max_new_tokens")  # always shown

DEFINITIONS = (
    ("S, D, A, E, G", "verify passes, drafted tokens, accepted draft tokens, examined tokens, "
     "generated tokens"),
    ("tau", "(G + C) / S, with C tokens that stop strings cut off; the correction or bonus token "
     "is included; plain decoding has 1"),
    ("A/D", "acceptance rate: accepted over drafted"),
    ("A/E", "examined rate: accepted over examined; examined are the accepted drafts and one for "
     "every pass that ended in a rejection"),
    ("per position, at best", "with --optimum: share of drafted positions that went on to a draft, "
     "and that share under the best rule that judges positions one by one, on average"),
    ("acceptance by position", "drafts accepted at depth i over S: unconditional, as in vLLM"),
    ("times that count", "times of records that the machine did not disturb more than the rest of "
     "the run; speeds and the split of time use them, everything else uses all records"),
    ("where the time goes", "of the records behind the speeds; s per prompt: all its samples"),
    ("prompts", "finished at least once; 9 of 10: those of them behind the speeds"),
    ("tokens/s", "generated tokens over wall time, prefill included, of the prompts and rounds "
     "that plain decoding has as well"),
    ("speed-up", "tokens per second over our own plain decoding on the same prompt; geometric mean "
     "over prompts, in brackets its 95 % interval: by bootstrap, below 10 prompts by Student's t "
     "of the logarithms"),
    ("without prefill", "the same with the prefill passes subtracted on both sides"),
    ("fastest, tied", "fastest: the highest speed-up of the methods with the most prompts; "
     "tied: the interval of the speed over the fastest contains 1, or the fastest drafted nothing "
     "and this is plain decoding"),
    ("pass@k", "probability that at least one of k answers is right, unbiased: with c of n right, "
     "1 - C(n - c, k) / C(n, k); mean over prompts"),
    ("predicted tau", "1 + the sum of the rates by position"),
    ("c(N)", "time of a pass over N rows over that of one row"),
    ("roofline", "the shortest time of a pass: bytes of weights, keys and values over the measured "
     "reading speed, or operations over the measured product speed, the longer of the two"),
    ("predicted speed-up", "tau times c(1) over c(1 + D/S): the speed-up if nothing but the pass "
     "took time; not for passes that several sequences share"),
)  # fmt: skip


def cost_section(manifest: Manifest, records: Sequence[Record]) -> Section:
    """c(N), the roofline, the achieved share of it, and predicted speed-ups."""
    prose, limits = [], manifest.limits
    if {"read_gb_s", "gflop_s"} <= limits.keys():
        reads = limits_of(records, "read_gb_s")
        drift = f" During the run: {value_range(reads, number)} GB/s." if reads else ""
        prose.append(
            f"Measured before the run: reading {number(limits['read_gb_s'])} GB/s, products "
            f"{number(limits['gflop_s'])} GFLOP/s in {manifest.dtype}.{drift}"
        )
    timed = undisturbed(records)
    tables = [_cost_table(manifest), _roofline_table(manifest, timed)]
    tables.append(_prediction_table(manifest, records, timed))
    return Section("Cost of a pass, and theory", prose, [t for t in tables if t.rows])


def _roofline(manifest: Manifest, rows: int) -> float | None:
    """Seconds of a pass at the limits, in the context of the cost curve."""
    cost = PassCost.from_dict(manifest.model)
    if cost is None or not {"read_gb_s", "gflop_s"} <= manifest.limits.keys():
        return None
    return cost.roofline_seconds(manifest.limits, context=theory.CONTEXT, rows=rows)


def _cost_table(manifest: Manifest) -> Table:
    rows: Rows = []
    relative = theory.relative_cost(manifest.cost_curve)
    for n in sorted(map(int, manifest.cost_curve)):
        seconds, floor = manifest.cost_curve[str(n)], _roofline(manifest, n)
        milliseconds = figure(1e3 * seconds), figure(1e3 * floor if floor else None)
        share = percent(metrics.ratio(floor, seconds))
        rows.append(
            [Cell(str(n), n), milliseconds[0], figure(relative.get(n)), milliseconds[1], share]
        )
    columns = ["rows N", "pass, ms", "c(N)", "roofline, ms", "roofline / pass"]
    return Table("Cost curve", columns, rows)


def _roofline_table(manifest: Manifest, records: Sequence[Record]) -> Table:
    rows: Rows = []
    for method in manifest.methods:
        if found := roofline_fraction(manifest, records, method):
            spent = (found.roofline_seconds, found.forward_seconds, found.step_seconds)
            shares = (found.of_forward, found.of_step)
            rows.append([method, *(figure(1e3 * s) for s in spent), *map(percent, shares)])
    columns = ["method", "roofline, ms", "pass, ms", "step, ms", "roofline / pass"]
    columns.append("roofline / step")
    return Table("Fraction of the roofline, average pass of the run", columns, rows)


def _prediction_table(
    manifest: Manifest, records: Sequence[Record], timed: Sequence[Record]
) -> Table:
    """tau and speed-up predicted from counts and the cost curve, and measured."""
    rows: Rows = []
    for task in manifest.tasks:
        for method in manifest.methods:
            mine = [r for r in records if r.task == task and r.method == method]
            totals = metrics.totals(metrics.samples_of(mine))
            if totals.passes and totals.drafted:
                # the cost curve is that of local passes over one sequence
                is_local = kind_of(method, manifest) == "own" and not metrics.batch_option(method)
                promise = theory.predicted_speed_up(totals, manifest.cost_curve)
                here = [r for r in timed if r.task == task]
                speed = metrics.speed_up(here, method, prefill=False)
                rows.append(
                    [
                        f"{task}, {method}",
                        figure(totals.drafted / totals.passes),
                        figure(totals.predicted_tau if totals.per_position else None),
                        figure(totals.tau),
                        Cell(factor(promise), promise) if is_local and promise > 0 else Cell("-"),
                        Cell(times(speed), speed.ratio if speed else None),
                    ]
                )
    columns = ["task, method", "D/S", "predicted tau", "tau", "predicted speed-up"]
    return Table("Prediction and measurement", [*columns, "speed-up without prefill"], rows)


def memory_section(manifest: Manifest, records: Sequence[Record]) -> Section:
    """Peak memory by method and part."""
    peaks = {m: metrics.peak_memory(r for r in records if r.method == m) for m in manifest.methods}
    peaks = {method: peak for method, peak in peaks.items() if peak}
    parts = list(dict.fromkeys(part for peak in peaks.values() for part in peak))
    rows: Rows = [
        [method, *(figure(peak[part] / 1e6 if part in peak else None) for part in parts)]
        for method, peak in peaks.items()
    ]
    prose = "No contestant reported its memory."
    if rows:
        prose = "Local methods share one model, its cache and its scratch; a peer has a process."
    return Section("Memory", [prose], [Table("", ["MB", *parts], rows)] if rows else [])


def failure_section(manifest: Manifest, records: Sequence[Record]) -> Section:
    """Skipped peers with the reason, and failures with their last lines."""
    num_records = Counter(record.method for record in records)
    rows: Rows = []
    for name, why in skipped(manifest).items():
        n = num_records[name]
        rows.append([name, f"left out after {counted(n, 'prompt')}" if n else "skipped", why])
    failures = Counter((r.method, r.task, r.error) for r in records if r.error is not None)
    for (method, task, error), count in failures.items():
        rows.append([method, f"failed on {count} of {task}", error or ""])
    if rows:
        table = Table("", ["method", "what", "reason or last lines"], rows, has_sentences=True)
        return Section("Skipped and failed", tables=[table])
    missing = incomplete(manifest, records)
    text = f"None so far, but {missing}." if missing else "None: all methods finished all prompts."
    return Section("Skipped and failed", [text])


def setup_section(manifest: Manifest) -> Section:
    """Model, machine, versions, seed, revision and command, to repeat the run."""
    facts: dict[str, Any] = {
        "command": manifest.command,
        "created": manifest.created,
        "forerun": f"{manifest.forerun}, revision {manifest.git or 'unknown'}",
        "number type, threads, seed": f"{manifest.dtype}, {manifest.threads}, {manifest.seed}",
        "sampling": _changed_sampling(manifest.sampling),
        **({"suite": manifest.suite} if manifest.suite else {}),
        **{f"model: {n}": value for n, value in manifest.model.items() if n != "path"},
        **{f"machine: {name}": value for name, value in manifest.machine.items()},
        **{f"peer: {n}": v for n, v in manifest.peers.items() if not isinstance(v, str)},
        **{f"memory of {name}": sizes for name, sizes in manifest.peer_memory.items()},
        **{f"task: {name}": value for name, value in manifest.tasks.items()},
        **{f"resumed {i}": one for i, one in enumerate(manifest.resumed, 1)},
    }
    rows = [[name, _plain(name, value)] for name, value in facts.items()]
    return Section("Setup", tables=[Table("", ["what", "value"], rows, has_sentences=True)])


def _changed_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """The main sampling parameters and those that differ from the defaults."""
    defaults = json.loads(json.dumps(asdict(Sampling())))
    return {k: v for k, v in sampling.items() if k in MAIN_SAMPLING or v != defaults.get(k)}


def _plain(name: str, value: Any) -> str:
    """A value for people: sizes in MB or GB, objects on one line."""
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
    """The definitions of all figures."""
    return Section("Definitions", terms=DEFINITIONS)
