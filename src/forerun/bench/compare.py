"""Has anything become slower? Two runs of the same prompts, method by method.

What the second run does no longer, as a method that fails there, counts as much.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forerun.bench.alerts import short
from forerun.bench.metrics import PLAIN, SpeedUp, calm, disturbed, quotient, ratios
from forerun.bench.ranking import awaited, holds_one, incomplete, skipped
from forerun.bench.results import Manifest, Record, examples_of, longest_of
from forerun.bench.scoring import last_line
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.utils.text import counted

SAME = ("dtype", "threads", "seed", "sampling")  # of two runs that are compared
INFORMED = ("forerun", "git", "turns")
SLOWER, UNSHOWN = "slower", "no difference shown"
ORDER = "first", "second"  # what the two runs are called
MACHINE = ("cpu", "cores", "kernels", "torch", "transformers", "device")


@dataclass(frozen=True)
class Change:
    """One method: tokens per second in the second run over the first."""

    method: str
    ratio: float  # geometric mean over prompts
    interval: tuple[float, float] | None  # 95 %, over prompts; None for one
    prompts: int
    # SLOWER beyond what is allowed; UNSHOWN where the interval holds 1 or there is none; or "ok"
    verdict: str

    @property
    def is_slower(self) -> bool:
        return self.verdict == SLOWER


@dataclass(frozen=True)
class Comparison:
    """All methods of both runs, and what else differs."""

    changes: list[Change]
    remarks: list[str]
    losses: list[str]  # what the second run does no longer, each a sentence

    @property
    def is_slower(self) -> bool:
        return any(change.is_slower for change in self.changes)

    @property
    def is_worse(self) -> bool:
        return self.is_slower or bool(self.losses)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        changes = [asdict(change) | {"is_slower": change.is_slower} for change in self.changes]
        verdict = {"worse": self.is_worse, "slower": self.is_slower, "losses": self.losses}
        return verdict | {"changes": changes, "remarks": self.remarks}


Run = tuple[Manifest, list[Record]]


def compare(
    before: Run,
    after: Run,
    *,
    max_slowdown: float = 0.05,
    relative: bool = False,
    only: Collection[str] = (),
) -> Comparison:
    """The second run against the first.

    relative: speed-ups over plain decoding of the same run instead of tokens per second, so that a
    machine that was busier the second time counts less. only: the methods of the first run that are
    compared, and asked for in the second; without it, all. Times that a busy machine spoiled do
    not count, as in reports, and are remarked. Raises DataError for runs that did
    not do the same, UnknownName for a method that the first run has not.
    """
    if not 0 <= max_slowdown < 1:
        raise ConfigError(f"--max-slowdown must be in [0, 1), got {max_slowdown}")
    after, moved = _renamed(after, before[0].tasks)
    _check_same(before, after)
    for name in only:
        if name not in before[0].methods:
            raise UnknownName.of("method of the first run", name, before[0].methods)
    if only:
        before, after = _limited(before, only), _limited(after, only)
    methods = _compared(before, after, relative)
    losses, unsure = new_failures(before, after)
    quiet = calm(before[1]), calm(after[1])
    changes, remarks = [], moved + _remarks(before, after, quiet) + unsure
    for method in methods:
        found = change_of(*quiet, method, relative=relative)
        if found is None:
            remarks.append(f"{method}: no prompt has a time that counts in both runs")
        else:
            said = SLOWER if found.ratio < 1 - max_slowdown else "ok"
            said = UNSHOWN if found.interval is None or holds_one(found) else said
            changes.append(Change(method, found.ratio, found.interval, found.prompts, said))
    if not changes and not losses:
        raise DataError(
            "no method has a prompt whose time counts in both runs, so nothing can be compared; "
            "`forerun bench report` shows what failed and what was disturbed"
        )
    slower = [change.method for change in changes if change.is_slower]
    if PLAIN in slower and len(slower) > 1:
        remarks.append(
            "plain decoding is slower, too, as on a busier machine: --relative compares speed-ups "
            "over it"
        )
    return Comparison(changes, remarks, losses)


def _remarks(before: Run, after: Run, quiet: Sequence[list[Record]]) -> list[str]:
    """What else differs, is missing or was disturbed; quiet: the records of both that count."""
    said = differences(before[0], after[0])
    if alone := [m for m in after[0].methods if m not in before[0].methods]:
        said.append(f"only in the second run, not compared: {', '.join(alone)}")
    if lacking := incomplete(*before):
        said.append(f"the first run is incomplete: {lacking}")
    said += _disturbances((before[1], after[1]), quiet)
    for name, (_, records) in zip(ORDER, (before, after), strict=True):
        of_some = [record for record in records if record.method in after[0].methods]
        said += [f"{line} (the {name} run)" for line in short(of_some)]
    return said


def _compared(before: Run, after: Run, relative: bool) -> list[str]:
    """The methods of both runs. Raises DataError where nothing can be compared."""
    methods = [
        m for m in before[0].methods if m in after[0].methods and (m != PLAIN or not relative)
    ]
    if not before[1]:
        raise DataError(
            "the first run has no records, so nothing can be compared; the same `forerun bench "
            "run` goes on with it"
        )
    if relative and before[0].methods == [PLAIN]:
        raise DataError(
            "--relative divides by plain decoding, and there is no other method to compare; leave "
            "it out, or name another method"
        )
    if not methods:
        beside = " beside plain" if relative else ""
        raise DataError(
            f"the runs share no method{beside}: {_names(before[0].methods)} and "
            f"{_names(after[0].methods)}; run both with the same --methods"
        )
    for name, (_, records) in zip(ORDER, (before, after), strict=True):
        if relative and records and not _of(records, PLAIN):
            raise DataError(
                f"the {name} run has no records of plain decoding, which --relative divides by; "
                "leave it out, or run both with plain among the --methods"
            )
    return methods


def _disturbances(runs: Sequence[list[Record]], quiet: Sequence[list[Record]]) -> list[str]:
    """Whose times a busy machine spoiled, and whose count all the same; quiet: those that count."""
    said = []
    if left_out := sum(map(len, runs)) - sum(map(len, quiet)):
        what = counted(left_out, "measurement")
        said.append(f"the times of {what}, disturbed more than the rest, do not count")
    for name, records, kept in zip(ORDER, runs, quiet, strict=True):
        if staying := sum(disturbed(records)) - len(records) + len(kept):
            said.append(
                f"the times of {counted(staying, 'measurement')} of the {name} run count though "
                "disturbed, as less than half would be left, or as all met it in turn"
            )
    return said


def _limited(run: Run, only: Collection[str]) -> Run:
    """The run as if only some methods had been planned.

    All records stay: they tell how quiet the machine was, and what plain decoding did.
    """
    manifest, records = run
    return replace(manifest, methods=[m for m in manifest.methods if m in only]), records


def new_failures(before: Run, after: Run) -> tuple[list[str], list[str]]:
    """What the second run does no longer, and its failures where the first has no record.

    The former are losses: methods that are gone or fail where they did not before, and planned
    measurements that are not there. The others may have failed in the first run, too.
    """
    losses, unsure, gone = [], [], skipped(after[0])
    for method in awaited(before[0]):
        finished = {r.prompt_key: r.error is None for r in _of(before[1], method)}
        mine = _of(after[1], method)
        failed = [(finished.get(r.prompt_key), r.error) for r in mine if r.error is not None]
        new = [error for was_finished, error in failed if was_finished]
        untried = [error for was_finished, error in failed if was_finished is None]
        if method not in after[0].methods:
            losses.append(f"{method} is not in the second run")
        elif method in gone:
            losses.append(f"{method} was left out of the second run: {last_line(gone[method])}")
        elif new:
            what = f"{method} failed on {len(new)} of {counted(len(mine), 'measurement')}"
            losses.append(f"{what}, not so in the first run: {last_line(new[0])}")
        if untried:
            what = f"failed on {counted(len(untried), 'measurement')} that the first run has not"
            unsure.append(f"{method} {what}: {last_line(untried[0])}")
    if lacking := incomplete(*after):
        losses.append(f"the second run is incomplete: {lacking}")
    return losses, unsure


def _renamed(run: Run, tasks: Mapping[str, Mapping[str, Any]]) -> tuple[Run, list[str]]:
    """The run with its tasks named as those, of other names, that have the same prompts: a file of
    prompts may have moved. And a remark on each."""
    manifest, records = run
    known: dict[str, list[str]] = {}
    for name, told in tasks.items():
        if name not in manifest.tasks:
            known.setdefault(told["hash"], []).append(name)
    names = {
        name: known[told["hash"]].pop(0)
        for name, told in manifest.tasks.items()
        if name not in tasks and known.get(told["hash"])
    }
    mine = {names.get(name, name): told for name, told in manifest.tasks.items()}
    moved = [replace(r, task=names.get(r.task, r.task)) for r in records] if names else records
    said = [f"{new} of the second run has the prompts of {old}" for new, old in names.items()]
    return (replace(manifest, tasks=mine), moved), said


def _check_same(before: Run, after: Run) -> None:
    """Refuses runs of different prompts, models or settings, and says which. Raises DataError."""
    a, b = before[0], after[0]
    if not a.tasks.keys() & b.tasks.keys():
        raise DataError(
            f"the runs share no task: {_names(a.tasks)} and {_names(b.tasks)}; run both with the "
            "same --tasks"
        )
    if a.model.get("hash") != b.model.get("hash"):
        models = " and ".join(repr(run.model.get("name")) for run in (a, b))
        raise DataError(f"the runs have different models: {models}; run both with the same --model")
    for name in dict.fromkeys([*a.tasks, *b.tasks]):
        if a.tasks.get(name, {}).get("hash") != b.tasks.get(name, {}).get("hash"):
            raise DataError(_unlike(name, before, after))
    for name in SAME:
        here, there = getattr(a, name), getattr(b, name)
        if here != there:
            what = f"{name} {here!r} and {there!r}"
            if isinstance(here, dict):
                keys = [k for k in here.keys() | there.keys() if here.get(k) != there.get(k)]
                what = ", ".join(f"{k} {here.get(k)!r} and {there.get(k)!r}" for k in sorted(keys))
            how = f": `{_elsewhere(a.command)}`" if a.command else ""
            raise DataError(
                f"the runs differ in {what}, so they cannot be compared; do one of them again, as "
                f"the other was done{how}"
            )
    for name in a.tasks:
        if (here := longest_of(a, name)) != (there := longest_of(b, name)):
            raise DataError(
                f"the runs differ in max_new_tokens of task {name!r}, {here} and {there}, so they "
                "cannot be compared; run both with the same"
            )


def _elsewhere(command: str) -> str:
    """A command of a run, into another folder."""
    words = iter(shlex.split(command))
    kept = list[str]()
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return f"{shlex.join(kept)} --out=ANOTHER"


def _unlike(name: str, *runs: Run) -> str:
    """How the prompts of a task differ between two runs."""
    told = f"the runs have different prompts in task {name!r}"
    sides = [run.tasks.get(name) for run, _ in runs]
    if missing := [which for which, side in zip(ORDER, sides, strict=True) if side is None]:
        return f"{told}, which the {missing[0]} run has not; run both with the same --tasks"
    counts = [examples_of(side or {})[0] for side in sides]
    if counts[0] != counts[1]:
        numbers = " and ".join(counted(count, "prompt") for count in counts)
        return f"{told} ({numbers}); run both with the same --tasks and --examples"
    seen = [
        {r.index: (r.id, r.num_prompt_tokens) for r in records if r.task == name}
        for _, records in runs
    ]
    unlike = [i for i in seen[0].keys() & seen[1].keys() if seen[0][i] != seen[1][i]]
    where = ""
    if unlike:  # later turns hold answers, so this may be one of those that do not differ
        at = min(unlike)
        here, there = ("{!r} of {} tokens".format(*side[at]) for side in seen)
        where = f", perhaps at prompt {at}: {here}, and {there}"
    return (
        f"{told} ({counted(counts[0], 'prompt')} in both, whose contents differ{where}); run both "
        "with the same file, or the same version of forerun"
    )


def _names(found: Iterable[str]) -> str:
    return ", ".join(found) or "none"


def differences(a: Manifest, b: Manifest) -> list[str]:
    """What differs between two runs and may explain a change: versions, machine, read limit."""
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in INFORMED]
    pairs += [(name, a.machine.get(name), b.machine.get(name)) for name in MACHINE]
    found = [f"{name}: {here} -> {there}" for name, here, there in pairs if here != there]
    here, there = (run.limits.get("read_gb_s", 0.0) for run in (a, b))
    if here and there:
        found.append(f"read limit: {here:.1f} -> {there:.1f} GB/s")
    return found


def change_of(
    before: Sequence[Record], after: Sequence[Record], method: str, *, relative: bool
) -> SpeedUp | None:
    """The ratio of a method, after over before; None if no prompt was finished in both."""
    if not relative:
        return ratios(*(_ungrouped(_of(run, method)) for run in (after, before)))
    sides = [ratios(_of(run, method), _of(run, PLAIN)) for run in (after, before)]
    return quotient(*sides)


def _ungrouped(records: Iterable[Record]) -> list[Record]:
    """The records as of one group; where plain decoding has several of a prompt, the first one."""
    first = {r.prompt_key: r for r in sorted(records, key=lambda r: -r.group)}
    return [replace(record, group=0) for record in first.values()]


def _of(records: Sequence[Record], method: str) -> list[Record]:
    return [record for record in records if record.method == method]
