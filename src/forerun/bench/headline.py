"""What a report says in ten seconds, and what it must not leave unsaid."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.bench.alerts import lone
from forerun.bench.charts import number
from forerun.bench.metrics import PLAIN, SpeedUp, at_once
from forerun.bench.ranking import (
    Entry,
    Standing,
    awaited,
    factor,
    holds_one,
    interval,
    is_vague,
    skipped,
    span,
    times,
)
from forerun.bench.results import Manifest, examples_of, peer_groups, sampling_of
from forerun.utils.text import counted

MAX_TASKS = 4  # more of them: only those that a peer wins get a line


def title(manifest: Manifest) -> str:
    """The head of a report: the model."""
    return f"forerun benchmark: {model_name(manifest)}"


def model_name(manifest: Manifest) -> str:
    """What the model is called, and whether it is an inflated one."""
    name = manifest.model.get("name") or "an unnamed model"
    return f"{name}{' (inflated)' if _source(manifest) else ''}"


def _source(manifest: Manifest) -> str:
    """The small model that this one was inflated from; "" for an ordinary model."""
    found = manifest.model.get("inflated_from")
    return str(found.get("name", "a smaller model")) if isinstance(found, dict) else ""


def context(manifest: Manifest) -> str:
    """Where and when, on one line."""
    machine = manifest.machine
    place = machine.get("gpu") or machine.get("cpu") or "unknown machine"
    parts = [
        *filter(None, [suite_words(manifest)]),
        f"{place}, {counted(manifest.threads, 'thread')}, {manifest.dtype}",
        f"temperature {sampling_of(manifest).temperature:g}",
        f"{counted(sum(examples_of(t)[0] for t in manifest.tasks.values()), 'prompt')} of "
        f"{', '.join(manifest.tasks)}",
        f"{counted(len(awaited(manifest)), 'method')} in {_runs(manifest)}",
        f"begun {manifest.created[:10]}, revision {manifest.git or 'unknown'}",
    ]
    return "; ".join(parts) + "."


def _runs(manifest: Manifest) -> str:
    groups = len(peer_groups(manifest))
    return f"{groups} interleaved groups" if groups > 1 else "one interleaved run"


def suite_words(manifest: Manifest) -> str:
    """ "suite real (greedy, held_out)"; "" where the tasks are no suite's."""
    found = manifest.suite
    return f"suite {found['name']} ({found['mode']}, {found['half']})" if found else ""


def tiles(standing: Standing) -> list[tuple[str, str]]:
    """The figures that matter most, each with its words; like is compared with like first."""
    own, peer, plain = standing.best("own"), standing.best("peer"), standing.best("plain")
    mine, other = standing.best("own", "plain"), best_plain_peer(standing)
    found: list[tuple[str, str]] = []
    alike = own and standing.plain_alike(own)
    like = standing.over(own, alike) if own and alike else None
    if own and alike and like:
        found.append(_tile(like, f"{own.method} over {alike.method}: what drafts give"))
    elif own and own.speed:
        idle = (
            ", though it drafted nothing"
            if own.totals.drafted == 0 and not at_once(own.method)
            else ""
        )
        found.append(_tile(own.speed, f"{own.method} over {_plainly(own)}{idle}"))
    if mine and peer and (speed := standing.over(mine, peer)):
        found.append(_tile(speed, f"{mine.method} over the best peer, {peer.method}"))
    is_told = mine is plain and peer is other
    if own and plain and other and not is_told and (speed := standing.over(plain, other)):
        found.append(_tile(speed, f"our plain decoding over the best plain peer, {other.method}"))
    if own and own.speed and like:
        words = f"{own.method} over {_plainly(own)}: drafts and several answers at once"
        found.append(_tile(own.speed, words))
    if own and own.totals.tau:
        found.append((number(own.totals.tau), f"tokens per pass (tau) of {own.method}"))
    return found


def _tile(speed: SpeedUp, words: str) -> tuple[str, str]:
    ends = interval(speed) or " (one prompt)"
    return "not told" if is_vague(speed) else factor(speed.ratio), words + ends


def best_plain_peer(standing: Standing) -> Entry | None:
    """The fastest peer without a mode: plain decoding elsewhere."""
    able = [
        e
        for e in standing.entries
        if e.kind == "peer" and ":" not in e.method and standing.is_ranked(e)
    ]
    return max(able, key=standing.pace, default=None)


def headline(everything: Standing, by_task: Mapping[str, Standing]) -> list[str]:
    """A line per task; of many tasks, those that a peer wins."""
    lines = [] if len(by_task) == 1 else [f"All tasks: {verdict(everything)}"]
    for task, standing in by_task.items():
        if len(by_task) <= MAX_TASKS or _is_lost(standing):
            lines.append(f"{task}: {verdict(standing)}")
    return lines


def remarks(manifest: Manifest, everything: Standing, by_task: Mapping[str, Standing]) -> list[str]:
    """What to know before believing it, and who is not in the figures."""
    lines = _caveats(everything, by_task)
    if source := _source(manifest):
        lines.append(
            f"The model is {source}, inflated with weights that change nothing in what it says: "
            "speeds are those of the new size, texts and acceptance those of the small model."
        )
    broke = [e.method for e in everything.entries if not e.is_sound]
    absent = [name for name in skipped(manifest) if name not in broke]
    if absent:
        lines.append(f"Skipped, not measured: {', '.join(absent)} (reasons below).")
    if broke:
        lines.append(f"Failed on some prompts: {', '.join(broke)} (last lines below).")
    return lines


def _caveats(everything: Standing, by_task: Mapping[str, Standing]) -> list[str]:
    """Choices made after the fact, and what rests on one prompt."""
    ranked = [e.kind for e in everything.entries if everything.is_ranked(e)]
    counts = {kind: ranked.count(kind) for kind in ("own", "peer")}
    chosen = [
        f"of {count} {words}"
        for count, words in (
            (counts["own"], "of ours"),
            (counts["peer"], "configurations of peers"),
        )
        if count > 1
    ]
    lines = [f"The best {' and '.join(chosen)}: chosen by these same figures."] if chosen else []
    return lines + lone({task: _sizes(standing) for task, standing in by_task.items()})


def _sizes(standing: Standing) -> list[int]:
    """Prompts that what is said of each method but plain decoding rests on."""
    return [e.timed_prompts for e in standing.entries if e.method != PLAIN]


def _is_lost(standing: Standing) -> bool:
    first = standing.best()
    return first is not None and first.kind == "peer"


def verdict(standing: Standing) -> str:
    """Ours against plain decoding and against the best peer, one sentence."""
    own, peer = standing.best("own"), standing.best("peer")
    mine = standing.best("own", "plain")
    if mine is None:
        return f"no method{_unfinished(standing) if peer else ' finished a prompt'}."
    if own and own.speed:
        said = f"{_over_plain(standing, own, own.speed)}, {counted(own.speed.prompts, 'prompt')}"
    else:
        said = f"{mine.method} decodes {number(mine.rate or 0.0)} tokens/s"
    return f"{said}; {_against(standing, mine, peer)}."


def _unfinished(standing: Standing) -> str:
    """Why none of ours has a place, where a peer has one."""
    ours = [entry for entry in standing.entries if entry.kind != "peer"]
    if not ours:
        return " of ours was run"
    some = any(entry.prompts for entry in ours)
    return f" of ours finished {'all prompts that others did' if some else 'a prompt'}"


def _over_plain(standing: Standing, own: Entry, speed: SpeedUp) -> str:
    alike = standing.plain_alike(own)
    same = standing.over(own, alike) if alike else None
    if own.totals.drafted == 0 and (same or not at_once(own.method)):
        found, name = (same, alike.method) if alike and same else (speed, _plainly(own))
        return f"{own.method} drafted nothing, so it is {name}: {times(found)}"
    said = _beside(speed, _plainly(own))
    like = f"{_beside(same, alike.method)}, and " if alike and same else ""
    return f"{own.method} {like}{said}"


def _beside(speed: SpeedUp, name: str) -> str:
    is_wide = is_vague(speed)
    told = span(*speed.interval) if speed.interval and is_wide else times(speed)
    if holds_one(speed):
        return f"cannot be told apart from {name}: {told}"
    if is_wide:
        who = "faster" if speed.ratio > 1 else "slower"
        return f"is {who} than {name}, by a factor that cannot be told ({told})"
    return f"is {told} as fast as {name}"


def _plainly(own: Entry) -> str:
    """What the baseline is called beside a method that may decode many answers at once."""
    return "our plain decoding" + (" of one answer after the other" if at_once(own.method) else "")


def _against(standing: Standing, mine: Entry, peer: Entry | None) -> str:
    speed = standing.over(mine, peer) if peer else None
    if peer is None:
        some = any(e.kind == "peer" and e.prompts for e in standing.entries)
        return "no peer finished all prompts" if some else "no peer was measured beside it"
    if speed is None:
        return f"no prompt has a time of both it and the best peer, {peer.method}, that counts"
    if speed.ratio < 1 and not holds_one(speed):
        reaches = "a share that cannot be told" if is_vague(speed) else times(speed)
        return f"the best peer, {peer.method}, is faster: {mine.method} reaches {reaches} of it"
    return f"{mine.method} {_beside(speed, f'the best peer, {peer.method}')}"
