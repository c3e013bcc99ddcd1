"""Compares two runs of the same prompts: which methods became slower, failed or disappeared."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forerun.bench.disturbance import undisturbed
from forerun.bench.metrics import PLAIN, SpeedUp, paired_speed_up, quotient
from forerun.bench.ranking import expected_methods, incomplete, is_tie, skipped
from forerun.bench.results import MODEL_HASHES, Manifest, Record, max_tokens_of
from forerun.bench.scoring import last_line
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.utils.text import counted

MUST_AGREE = ("dtype", "threads", "seed", "sampling", "target", "constraint")
INFORMATIVE = ("forerun", "git", "turns")
MACHINE_FACTS = ("cpu", "cores", "kernels", "torch", "transformers", "device")
SLOWER, NO_DIFFERENCE, OK = "slower", "no difference shown", "ok"
NAMES = "first", "second"

Run = tuple[Manifest, list[Record]]


@dataclass(frozen=True)
class Change:
    """One method: tokens per second in the second run over the first."""

    method: str
    ratio: float  # geometric mean over prompts
    interval: tuple[float, float] | None  # 95 %, over prompts; None for one
    prompts: int
    verdict: str  # SLOWER beyond the limit; NO_DIFFERENCE without an interval that excludes 1; OK

    @property
    def is_slower(self) -> bool:
        return self.verdict == SLOWER


@dataclass(frozen=True)
class Comparison:
    """All common methods, remarks on other differences, and losses."""

    changes: list[Change]
    remarks: list[str]
    losses: list[str]  # what the second run lacks, one sentence each

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


def compare(
    before: Run,
    after: Run,
    *,
    max_slowdown: float = 0.05,
    relative: bool = False,
    only: Collection[str] = (),
) -> Comparison:
    """The second run against the first.

    relative: compares speed-ups over plain decoding of the same run instead of tokens per second,
    which a busier machine affects less. only: the methods of the first run to compare and to expect
    in the second; all if empty. Disturbed times do not count. Raises DataError for runs that cannot
    be compared, UnknownName for a method that the first run lacks.
    """
    if not 0 <= max_slowdown < 1:
        raise ConfigError(f"--max-slowdown must be in [0, 1), got {max_slowdown}")
    after, remarks = _with_names_of(before[0], after)
    _check_same(before[0], after[0])
    for name in only:
        if name not in before[0].methods:
            raise UnknownName.of("method of the first run", name, before[0].methods)
    if only:
        before, after = _limited(before, only), _limited(after, only)
    methods = _common_methods(before, after, relative)
    losses, unsure = new_failures(before, after)
    timed = undisturbed(before[1]), undisturbed(after[1])
    remarks += _remarks(before, after, timed) + unsure
    changes = []
    for method in methods:
        speed = change_of(*timed, method, relative=relative)
        if speed is None:
            remarks.append(f"{method}: no prompt has an undisturbed time in both runs")
        else:
            verdict = _verdict(speed, max_slowdown)
            changes.append(Change(method, speed.ratio, speed.interval, speed.prompts, verdict))
    if not changes and not losses:
        raise DataError(
            "no method has a prompt with an undisturbed time in both runs; `forerun bench report` "
            "shows failures and disturbances"
        )
    slower = [change.method for change in changes if change.is_slower]
    if PLAIN in slower and len(slower) > 1:
        remarks.append("plain decoding is slower, too; --relative compares speed-ups over it")
    return Comparison(changes, remarks, losses)


def _verdict(speed: SpeedUp, max_slowdown: float) -> str:
    if speed.interval is None or is_tie(speed):
        return NO_DIFFERENCE
    return SLOWER if speed.ratio < 1 - max_slowdown else OK


def change_of(
    before: Sequence[Record], after: Sequence[Record], method: str, *, relative: bool
) -> SpeedUp | None:
    """The ratio of a method, after over before; None without a prompt finished in both."""
    if not relative:
        return paired_speed_up(*(_ungrouped(_of(run, method)) for run in (after, before)))
    sides = [paired_speed_up(_of(run, method), _of(run, PLAIN)) for run in (after, before)]
    return quotient(*sides)


def _ungrouped(records: Iterable[Record]) -> list[Record]:
    """The records as one group; of several records of a prompt, that of the first group."""
    first = {r.prompt_key: r for r in sorted(records, key=lambda r: -r.group)}
    return [replace(record, group=0) for record in first.values()]


def _of(records: Sequence[Record], method: str) -> list[Record]:
    return [record for record in records if record.method == method]


def _limited(run: Run, only: Collection[str]) -> Run:
    """The run with only these methods planned; all records stay, to judge disturbances."""
    manifest, records = run
    return replace(manifest, methods=[m for m in manifest.methods if m in only]), records


def _common_methods(before: Run, after: Run, relative: bool) -> list[str]:
    """The methods of both runs. Raises DataError if nothing can be compared."""
    skip = {PLAIN} if relative else set()
    methods = [m for m in before[0].methods if m in after[0].methods and m not in skip]
    if not before[1]:
        raise DataError("the first run has no records; resume it with its `forerun bench run`")
    if not methods:
        others = " other than plain" if relative else ""
        raise DataError(
            f"the runs share no method{others}: {', '.join(before[0].methods)} and "
            f"{', '.join(after[0].methods)}; run both with the same --methods"
        )
    for name, (_, records) in zip(NAMES, (before, after), strict=True):
        if relative and records and not _of(records, PLAIN):
            raise DataError(
                f"the {name} run has no records of plain decoding, which --relative needs; drop "
                "--relative, or run both with plain"
            )
    return methods


def _remarks(before: Run, after: Run, timed: Sequence[list[Record]]) -> list[str]:
    """Other differences, missing records and disturbed times."""
    lines = differences(before[0], after[0])
    if extra := [m for m in after[0].methods if m not in before[0].methods]:
        lines.append(f"only in the second run, not compared: {', '.join(extra)}")
    if missing := incomplete(*before):
        lines.append(f"the first run is incomplete: {missing}")
    if dropped := len(before[1]) + len(after[1]) - sum(map(len, timed)):
        lines.append(f"{counted(dropped, 'disturbed time')} not counted")
    return lines


def differences(a: Manifest, b: Manifest) -> list[str]:
    """Differences of two runs that may explain a change: versions, machine, reading speed."""
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in INFORMATIVE]
    pairs += [(name, a.machine.get(name), b.machine.get(name)) for name in MACHINE_FACTS]
    found = [f"{name}: {here} -> {there}" for name, here, there in pairs if here != there]
    here, there = (run.limits.get("read_gb_s", 0.0) for run in (a, b))
    if here and there:
        found.append(f"read limit: {here:.1f} -> {there:.1f} GB/s")
    return found


def new_failures(before: Run, after: Run) -> tuple[list[str], list[str]]:
    """(losses, remarks) of the second run.

    Losses are methods that disappeared or newly fail, and missing measurements. Remarks are
    failures on prompts without a record in the first run.
    """
    losses, unsure, gone = [], [], skipped(after[0])
    for method in expected_methods(before[0]):
        succeeded = {r.prompt_key: r.error is None for r in _of(before[1], method)}
        mine = _of(after[1], method)
        failed = [(succeeded.get(r.prompt_key), r.error) for r in mine if r.error is not None]
        new = [error for was_ok, error in failed if was_ok]
        untried = [error for was_ok, error in failed if was_ok is None]
        if method not in after[0].methods:
            losses.append(f"{method} is not in the second run")
        elif method in gone:
            losses.append(f"{method} was left out of the second run: {last_line(gone[method])}")
        elif new:
            what = f"{method} newly fails on {len(new)} of {counted(len(mine), 'measurement')}"
            losses.append(f"{what}: {last_line(new[0])}")
        if untried:
            what = f"fails on {counted(len(untried), 'measurement')} missing in the first run"
            unsure.append(f"{method} {what}: {last_line(untried[0])}")
    if missing := incomplete(*after):
        losses.append(f"the second run is incomplete: {missing}")
    return losses, unsure


def _with_names_of(before: Manifest, run: Run) -> tuple[Run, list[str]]:
    """The run with tasks renamed as those with the same prompts in `before`, and remarks.

    A prompt file may have moved between the runs.
    """
    manifest, records = run
    known: dict[str, list[str]] = {}
    for name, task in before.tasks.items():
        if name not in manifest.tasks:
            known.setdefault(task["hash"], []).append(name)
    names = {
        name: known[task["hash"]].pop(0)
        for name, task in manifest.tasks.items()
        if name not in before.tasks and known.get(task["hash"])
    }
    tasks = {names.get(name, name): task for name, task in manifest.tasks.items()}
    moved = [replace(r, task=names.get(r.task, r.task)) for r in records]
    remarks = [f"{new} of the second run has the prompts of {old}" for new, old in names.items()]
    return (replace(manifest, tasks=tasks), moved), remarks


def _check_same(a: Manifest, b: Manifest) -> None:
    """Refuses runs of different prompts, models or settings. Raises DataError."""
    if not a.tasks.keys() & b.tasks.keys():
        raise DataError(
            f"the runs share no task: {', '.join(a.tasks)} and {', '.join(b.tasks)}; run both with "
            "the same --tasks"
        )
    pairs = [(a.model.get(name), b.model.get(name)) for name in MODEL_HASHES]
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        models = " and ".join(repr(run.model.get("name")) for run in (a, b))
        raise DataError(f"the runs have different models: {models}; run both with the same --model")
    for name in dict.fromkeys([*a.tasks, *b.tasks]):
        if a.tasks.get(name, {}).get("hash") != b.tasks.get(name, {}).get("hash"):
            counts = [run.tasks.get(name, {}).get("examples", 0) for run in (a, b)]
            raise DataError(
                f"the runs have different prompts in task {name!r} ({counts[0]} and {counts[1]}); "
                "run both with the same --tasks, --examples and files"
            )
    for name in MUST_AGREE:
        here, there = getattr(a, name), getattr(b, name)
        if here != there:
            raise DataError(f"the runs differ in {_difference(name, here, there)}; run one again")
    for name in a.tasks:
        if (here := max_tokens_of(a, name)) != (there := max_tokens_of(b, name)):
            raise DataError(
                f"the runs differ in max_new_tokens of task {name!r}, {here} and {there}; run one "
                "again"
            )


def _difference(name: str, here: Any, there: Any) -> str:
    if not isinstance(here, dict):
        return f"{name}: {here!r} and {there!r}"
    keys = sorted(k for k in here.keys() | there.keys() if here.get(k) != there.get(k))
    return ", ".join(f"{k}: {here.get(k)!r} and {there.get(k)!r}" for k in keys)
