"""The top of a report: title, context, main figures, one sentence per task, remarks."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.bench.alerts import single_prompt
from forerun.bench.formatting import factor, number, span, times
from forerun.bench.metrics import PLAIN, SpeedUp, batch_option
from forerun.bench.ranking import Entry, Ranking, expected_methods, is_tie, skipped
from forerun.bench.results import Manifest, num_examples, peer_groups, sampling_of
from forerun.utils.text import counted

MAX_TASKS = 4  # with more tasks, only those that a peer wins get a line


def title(manifest: Manifest) -> str:
    return f"forerun benchmark: {model_name(manifest)}"


def model_name(manifest: Manifest) -> str:
    """The name of the model, marked if it was inflated."""
    name = manifest.model.get("name") or "an unnamed model"
    return f"{name}{' (inflated)' if _inflated_from(manifest) else ''}"


def _inflated_from(manifest: Manifest) -> str:
    """The small model that this one was inflated from; "" for an ordinary model."""
    found = manifest.model.get("inflated_from")
    return str(found.get("name", "a smaller model")) if isinstance(found, dict) else ""


def context(manifest: Manifest) -> str:
    """Machine, sampling, tasks, methods, date and revision on one line."""
    machine, suite = manifest.machine, manifest.suite
    groups = len(peer_groups(manifest))
    prompts = sum(num_examples(task)[0] for task in manifest.tasks.values())
    parts = [
        *([f"suite {suite['name']} ({suite['mode']}, {suite['half']})"] if suite else []),
        str(machine.get("gpu") or machine.get("cpu") or "unknown machine"),
        f"{counted(manifest.threads, 'thread')}, {manifest.dtype}",
        f"temperature {sampling_of(manifest).temperature:g}",
        f"{counted(prompts, 'prompt')} of {', '.join(manifest.tasks)}",
        f"{counted(len(expected_methods(manifest)), 'method')} in "
        + (f"{groups} interleaved groups" if groups > 1 else "one interleaved run"),
        f"started {manifest.created[:10]}, revision {manifest.git or 'unknown'}",
    ]
    return "; ".join(parts) + "."


def tiles(ranking: Ranking) -> list[tuple[str, str]]:
    """The main figures, each with its words; equal batch sizes are compared first."""
    own, peer, plain = (ranking.best(kind) for kind in ("own", "peer", "plain"))
    mine, plain_peer = ranking.best("own", "plain"), best_plain_peer(ranking)
    found: list[tuple[str, str]] = []
    same_batch = own and ranking.plain_with_same_batch(own)
    ratio = ranking.over(own, same_batch) if own and same_batch else None
    if own and same_batch and ratio:
        found.append(_tile(ratio, f"{own.method} over {same_batch.method}, the gain of drafting"))
    if own and own.speed:
        found.append(_tile(own.speed, f"{own.method} over {_baseline_name(own)}"))
    if mine and peer and (speed := ranking.over(mine, peer)):
        found.append(_tile(speed, f"{mine.method} over the best peer, {peer.method}"))
    is_new = mine is not plain or peer is not plain_peer
    if own and plain and plain_peer and is_new and (speed := ranking.over(plain, plain_peer)):
        found.append(_tile(speed, f"plain decoding over the best plain peer, {plain_peer.method}"))
    if own and own.totals.tau:
        found.append((number(own.totals.tau), f"tokens per pass (tau) of {own.method}"))
    return found


def _tile(speed: SpeedUp, words: str) -> tuple[str, str]:
    return factor(
        speed.ratio
    ), f"{words} ({span(*speed.interval) if speed.interval else 'one prompt'})"


def _baseline_name(own: Entry) -> str:
    """The baseline, which decodes one answer at a time also for batched methods."""
    return "our plain decoding" + (" with batch size 1" if batch_option(own.method) else "")


def best_plain_peer(ranking: Ranking) -> Entry | None:
    """The fastest peer in its plain mode."""
    peers = [e for e in ranking.entries if e.kind == "peer" and ":" not in e.method]
    return max((e for e in peers if ranking.is_ranked(e)), key=ranking.score, default=None)


def summary(ranking: Ranking, by_task: Mapping[str, Ranking]) -> list[str]:
    """One line per task; with many tasks, only those that a peer wins."""
    lines = [] if len(by_task) == 1 else [f"All tasks: {verdict(ranking)}"]
    for task, one in by_task.items():
        first = one.best()
        if len(by_task) <= MAX_TASKS or (first is not None and first.kind == "peer"):
            lines.append(f"{task}: {verdict(one)}")
    return lines


def verdict(ranking: Ranking) -> str:
    """The best local method against plain decoding and against the best peer, in one sentence."""
    own, peer, mine = ranking.best("own"), ranking.best("peer"), ranking.best("own", "plain")
    if mine is None:
        return "no local method finished all prompts." if peer else "no method finished a prompt."
    if own and own.speed:
        words = f"{_over_plain(ranking, own, own.speed)}, {counted(own.speed.prompts, 'prompt')}"
    else:
        words = f"{mine.method} decodes {number(mine.rate or 0.0)} tokens/s"
    return f"{words}; {_against_peer(ranking, mine, peer)}."


def _over_plain(ranking: Ranking, own: Entry, speed: SpeedUp) -> str:
    same_batch = ranking.plain_with_same_batch(own)
    ratio = ranking.over(own, same_batch) if same_batch else None
    if own.totals.drafted == 0 and (ratio or not batch_option(own.method)):
        return f"{own.method} drafted nothing, so it is plain decoding: {times(ratio or speed)}"
    parts = [_compared(ratio, same_batch.method)] if same_batch and ratio else []
    return f"{own.method} {' and '.join([*parts, _compared(speed, _baseline_name(own))])}"


def _compared(speed: SpeedUp, name: str) -> str:
    if is_tie(speed):
        return f"ties with {name}: {times(speed)}"
    return f"is {times(speed)} as fast as {name}"


def _against_peer(ranking: Ranking, mine: Entry, peer: Entry | None) -> str:
    speed = ranking.over(mine, peer) if peer else None
    if peer is None:
        has_peer = any(e.kind == "peer" and e.prompts for e in ranking.entries)
        return "no peer finished all prompts" if has_peer else "no peer was measured"
    if speed is None:
        return f"no prompt has an undisturbed time of both it and the best peer, {peer.method}"
    if speed.ratio < 1 and not is_tie(speed):
        return (
            f"the best peer, {peer.method}, is faster: {mine.method} reaches {times(speed)} of it"
        )
    return f"{mine.method} {_compared(speed, f'the best peer, {peer.method}')}"


def remarks(manifest: Manifest, ranking: Ranking, by_task: Mapping[str, Ranking]) -> list[str]:
    """Selection of the best, single prompts, inflated models, missing methods."""
    ranked = [e.kind for e in ranking.entries if ranking.is_ranked(e)]
    chosen = [
        f"of {ranked.count(kind)} {words}"
        for kind, words in (("own", "local methods"), ("peer", "peer configurations"))
        if ranked.count(kind) > 1
    ]
    lines = [f"The best {' and '.join(chosen)} is selected by these figures."] if chosen else []
    prompts = {
        task: [e.timed_prompts for e in one.entries if e.method != PLAIN]
        for task, one in by_task.items()
    }
    lines += single_prompt(prompts)
    if source := _inflated_from(manifest):
        lines.append(
            f"The model is {source}, inflated with weights that do not change its outputs: speeds "
            "are those of the large size, texts and acceptance those of the small model."
        )
    failed = [e.method for e in ranking.entries if not e.has_no_failure]
    if absent := [name for name in skipped(manifest) if name not in failed]:
        lines.append(f"Skipped, not measured: {', '.join(absent)} (reasons below).")
    if failed:
        lines.append(f"Failed on some prompts: {', '.join(failed)} (errors below).")
    return lines
