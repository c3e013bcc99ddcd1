"""Warnings of a run: missing measurements, a busy machine, results that rest on too little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forerun.bench.disturbance import MAX_EXTRA_LOSS, busy, limits_of, undisturbed
from forerun.bench.formatting import counts_by_name, number, value_range
from forerun.bench.metrics import PLAIN, truncated
from forerun.bench.ranking import incomplete
from forerun.bench.results import (
    Manifest,
    Record,
    max_tokens_of,
    num_examples,
    peer_groups,
    sampling_of,
)
from forerun.utils.text import counted


def alerts(manifest: Manifest, records: Sequence[Record]) -> list[str]:
    """All warnings of a run, one line each."""
    lines = plan_alerts(manifest)
    if missing := incomplete(manifest, records):
        lines.append(f"Incomplete: {missing}. The figures cover what exists.")
    lines += [_memory_pressure(manifest, records), _groups(manifest)]
    lines += [_busy_machine(records), _no_baseline(records)]
    return [line for line in lines if line]


def plan_alerts(manifest: Manifest) -> list[str]:
    """Warnings known before the first record: prompts left out, identical greedy samples."""
    lines = [_left_out(name, task) for name, task in manifest.tasks.items()]
    sampling = sampling_of(manifest)
    if sampling.is_greedy and sampling.n > 1:
        lines.append(
            f"At temperature 0 the {sampling.n} samples of a prompt are identical, so drafters "
            "that learn get unrealistic speed-ups; use -n 1."
        )
    return [line for line in lines if line]


def _left_out(name: str, task: Mapping[str, Any]) -> str:
    """The prompts of a task that are not measured, and why; "" for none."""
    taken, total = num_examples(task)
    too_long = task.get("left_out", 0)
    why = [f"{too_long} too long for the context"] if too_long else []
    if beyond := total - taken - too_long:
        why.append(f"{beyond} beyond --examples")
    return (
        f"{name}: {taken} of {counted(total, 'prompt')} measured; {', '.join(why)}." if why else ""
    )


def single_prompt(prompts: Mapping[str, Sequence[int]]) -> list[str]:
    """The tasks with a speed-up of fewer than three prompts. prompts: by task, of each speed-up."""
    tasks = [task for task, counts in prompts.items() if min(counts, default=3) < 3]
    return [f"Fewer than three prompts give no interval: {', '.join(tasks)}."] if tasks else []


def truncated_answers(manifest: Manifest, records: Sequence[Record]) -> str:
    """Answers of one task that the token limit cut before a full score; "" for none."""
    by_method = {m: truncated(r for r in records if r.method == m) for m in manifest.methods}
    found = [f"{m} {cut} of {scored}" for m, (cut, scored) in by_method.items() if cut]
    if not found:
        return ""
    limit = max_tokens_of(manifest, records[0].task)
    return f"Answers cut by --max-new-tokens ({limit}): {', '.join(found)}."


def _memory_pressure(manifest: Manifest, records: Sequence[Record]) -> str:
    pressed = [r for r in records if r.is_short_of_memory]
    if not pressed:
        return ""
    swapped = sum(limits_of(pressed, "swapped_bytes"))
    stalled = max(limits_of(pressed, "memory_stalled"))
    counts = Counter(r.method for r in pressed)
    names = counts_by_name({m: counts[m] for m in manifest.methods if counts[m]})
    timed = set(map(id, undisturbed(records)))
    kept = sum(id(r) in timed for r in pressed)
    use = f"{kept} of their times still count" if kept else "Their times do not count"
    return (
        f"Memory pressure in {len(pressed)} of {len(records)} measurements ({names}): programs "
        f"stalled up to {stalled:.0%} of the time, {number(swapped / 1e6)} MB swapped. {use}. "
        "End other programs or use fewer --peers."
    )


def _groups(manifest: Manifest) -> str:
    groups = list(peer_groups(manifest).values())
    if len(groups) < 2:
        return ""
    names = "; ".join(", ".join(names) for names in groups)
    return (
        f"Peers ran in {len(groups)} groups for lack of memory, each interleaved with {PLAIN} "
        f"decoding: {names}. Methods of different groups are compared by their speed-ups."
    )


def _busy_machine(records: Sequence[Record]) -> str:
    """One line on how busy the machine was and how many times do not count for it."""
    is_busy = busy(records)
    reads, losses = (limits_of(records, name) for name in ("read_gb_s", "taken"))
    if not any(is_busy) and (not losses or np.median(losses) <= MAX_EXTRA_LOSS):
        return ""
    timed = set(map(id, undisturbed(records)))
    dropped = sum(b and id(r) not in timed for r, b in zip(records, is_busy, strict=True))
    facts = [f"memory read at {value_range(reads, number)} GB/s"] if reads else []
    used = sum(is_busy) - dropped
    kept = f"; {used} more {'was' if used == 1 else 'were'} disturbed, but used" if used else ""
    facts += [lost_cores_text(*losses)] if losses and max(losses) >= 0.005 else []
    return (
        f"The machine was busy: {', '.join(facts)}. Of "
        f"{counted(len(records), 'time')}, {dropped} {'was' if dropped == 1 else 'were'} disturbed "
        f"and left out of the speeds{kept}."
    )


def lost_cores_text(*losses: float) -> str:
    """Shares of the cores lost to other programs, in words."""
    return f"{value_range(losses, '{:.0%}'.format)} of the cores were lost to other programs"


def _no_baseline(records: Sequence[Record]) -> str:
    """The tasks without speed-ups because plain decoding did not run or finish."""
    plain = [record for record in records if record.method == PLAIN]
    if not plain:
        return "No speed-ups: plain decoding is not among the methods."
    done = {record.task for record in plain if record.error is None}
    bare = [task for task in dict.fromkeys(r.task for r in records) if task not in done]
    return f"No speed-ups on {', '.join(bare)}: plain decoding finished no prompt." if bare else ""
