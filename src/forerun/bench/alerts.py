"""What keeps the figures of a run from being those of all of it, on a quiet machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from forerun.bench import metrics
from forerun.bench.charts import number
from forerun.bench.metrics import PLAIN, TAKEN, beside, calm, cut
from forerun.bench.ranking import incomplete, listed
from forerun.bench.results import (
    Manifest,
    Record,
    examples_of,
    longest_of,
    peer_groups,
    sampling_of,
)
from forerun.utils.text import counted

SHORT = 0.1  # seconds of a record: a few slices of a scheduler


def shortfall(name: str, told: Mapping[str, Any]) -> str:
    """Which prompts of a task are not measured, and why; "" where all are."""
    taken, whole = examples_of(told)
    if taken == whole:
        return ""
    left_out = told.get("left_out", 0)
    why = [f"{left_out} too long for the context"] if left_out else []
    if beyond := whole - taken - left_out:
        why.append(f"{beyond} beyond --examples")
    return f"{name}: {taken} of {counted(whole, 'prompt')} take part; {', '.join(why)}."


def of_the_plan(manifest: Manifest) -> list[str]:
    """What to know before the first record: prompts that are not measured, samples that are one,
    threads without cores."""
    found = [shortfall(name, told) for name, told in manifest.tasks.items()]
    found.append(too_many_threads(manifest.threads, manifest.machine.get("cores")))
    sampling = sampling_of(manifest)
    if sampling.is_greedy and sampling.n > 1:
        found.append(
            f"At temperature 0 the {sampling.n} samples of a prompt are the same text. A drafter "
            "that learns from one finds it again in the next, so speed-ups are those of copies; "
            "-n 1 measures each text once."
        )
    return [line for line in found if line]


def too_many_threads(threads: int, cores: int | None) -> str:
    """That they wait for each other, if there are more than cores and these are known; else ""."""
    if not cores or threads <= cores:
        return ""
    return (
        f"{threads} threads on {counted(cores, 'core')}: they wait for each other, so speeds are "
        f"not those of the machine; --threads {cores} measures them."
    )


def alerts(manifest: Manifest, records: Sequence[Record]) -> list[str]:
    """What keeps the figures from being those of the whole run, or of different texts."""
    said = of_the_plan(manifest)
    if lacking := incomplete(manifest, records):
        said.append(f"Incomplete: {lacking}. The figures cover what is there.")
    said += _memory_pressure(manifest, records) + _groups(manifest)
    said += _disturbances(manifest, records) + short(records)
    said += _without_plain(records)
    if again := sum(int(one.get("again", 0)) for one in manifest.resumed):
        are = f"{counted(again, 'measurement')} {'was' if again == 1 else 'were'}"
        said.append(f"{are} made anew later, after a failure or with a line that was lost.")
    revisions = dict.fromkeys([manifest.git, *(one.get("git", "") for one in manifest.resumed)])
    if len(revisions) > 1:
        named = ", ".join(one or "unknown" for one in revisions)
        said.append(f"Measured by more than one revision of forerun: {named}.")
    return said


def lone(sizes: Mapping[str, Sequence[int]]) -> list[str]:
    """What rests on one prompt. sizes: by task, the prompts of each speed-up."""
    single = [task for task, some in sizes.items() if 1 in some]
    if not single:
        return []
    return [f"One prompt gives no interval, so what it shows may be chance: {', '.join(single)}."]


def cut_answers(manifest: Manifest, records: Sequence[Record]) -> str:
    """How many answers the limit of tokens ended, as far as that costs score; "" if none.

    records: those of one task.
    """
    by_method = {m: cut(r for r in records if r.method == m) for m in manifest.methods}
    told = [f"{m} {ended} of {scored}" for m, (ended, scored) in by_method.items() if ended]
    if not told:
        return ""
    return (
        f"Answers cut by --max-new-tokens ({longest_of(manifest, records[0].task)}), which count "
        f"as wrong or for what they hold: {', '.join(told)}."
    )


def _memory_pressure(manifest: Manifest, records: Sequence[Record]) -> list[str]:
    """That the machine swapped or waited for memory, and which times do not count for that."""
    pressed = [r for r in records if r.is_short_of_memory]
    if not pressed:
        return []
    swapped, least, stalled = (
        beside(pressed, name) for name in ("swapped_bytes", "available_bytes", "memory_stalled")
    )
    seen = [f"programs waited for it up to {max(stalled):.0%} of the time"]
    seen += [f"{_megabytes(sum(swapped))} MB were swapped"] if sum(swapped) else []
    seen += [f"{_megabytes(min(least))} MB were available at the least"] if least else []
    counts = Counter(r.method for r in pressed)
    named = listed({m: counts[m] for m in manifest.methods if counts[m]})
    timed = set(map(id, calm(records)))
    kept = sum(id(r) in timed for r in pressed)
    what = "Their times do not count."
    if kept:
        what = f"The times of {kept} of them count all the same, as too few would be left."
    return [
        f"Memory was short during {len(pressed)} of {len(records)} measurements ({named}): "
        f"{', '.join(seen)}. {what} End other programs, or name fewer --peers."
    ]


def _megabytes(size: float) -> str:
    return number(size / 1e6)


def _groups(manifest: Manifest) -> list[str]:
    """That peers did not run at the same time."""
    groups = list(peer_groups(manifest).values())
    if len(groups) < 2:
        return []
    named = "; ".join(", ".join(names) for names in groups)
    return [
        f"Memory had no room for all peers at once, so they ran in {len(groups)} groups, each "
        f"interleaved with {PLAIN} decoding: {named}. Speed-ups are within a group; two methods of "
        "different groups are compared by their speed-ups."
    ]


def _disturbances(manifest: Manifest, records: Sequence[Record]) -> list[str]:
    """How busy the machine was, and whose times do not count for that."""
    pairs = zip(records, metrics.busy(records), strict=True)
    busy = [record for record, is_bad in pairs if is_bad]
    reads, takes = (beside(records, name) for name in ("read_gb_s", "taken"))
    if not busy and (not takes or np.median(takes) <= TAKEN):
        return []
    seen = [f"it read {among(reads, number)} GB/s"] if reads else []
    if takes and max(takes) >= 0.005:
        told_by = f" (told by {len(takes)} of {len(records)})" if len(takes) < len(records) else ""
        seen.append(lost_cores(*takes) + told_by)
    timed = set(map(id, calm(records)))
    spoiled = Counter(r.method for r in busy if id(r) not in timed)
    named = listed({m: spoiled[m] for m in manifest.methods if spoiled[m]})
    told = []
    if spoiled:
        told.append(
            f"The times of {spoiled.total()} of {len(records)} measurements, disturbed more than "
            f"the rest, do not count ({named})."
        )
    if staying := len(busy) - spoiled.total():
        told.append(
            f"The times of {staying} that were disturbed count all the same, as less than half of "
            "a task would be left, or as all methods met it in turn."
        )
    what = " ".join(told) or "It was so throughout: every time counts."
    return [f"The machine was not quiet: beside the prompts {', and '.join(seen)}. {what}"]


def short(records: Sequence[Record]) -> list[str]:
    """That most records are over before a disturbance shows."""
    found = [record.seconds for record in records if record.error is None]
    if not found or (typical := float(np.median(found))) >= SHORT:
        return []
    return [
        f"Half of the measurements take less than {number(1000 * typical)} ms, in which one moment "
        "of another program decides: longer texts, or more of them (-n), tell more."
    ]


def lost_cores(*taken: float) -> str:
    """Shares of the cores that were lost, in words."""
    return f"{among(taken, '{:.0%}'.format)} of the cores were lost to other programs or to halts"


def among(values: Sequence[float], form: Callable[[float], str]) -> str:
    """ "22.3 to 34.8", or "30.5" where both ends read the same."""
    return " to ".join(dict.fromkeys(form(end) for end in (min(values), max(values))))


def _without_plain(records: Sequence[Record]) -> list[str]:
    """Where there are no speed-ups, because plain decoding did not run or finish."""
    plain = [record for record in records if record.method == PLAIN]
    if not plain:
        return ["Plain decoding is not among the records, so there are no speed-ups."]
    finished = {record.task for record in plain if record.error is None}
    bare = [task for task in dict.fromkeys(r.task for r in records) if task not in finished]
    where = f" of {', '.join(bare)}" if finished else ""
    return [f"Plain decoding finished no prompt{where}, so there are no speed-ups."] if bare else []
