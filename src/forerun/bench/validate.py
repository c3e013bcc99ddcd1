"""What a run can have written: rules for its manifest, its records and their samples, as tables.

A rule is about what stands at a path of such a part. What is not told, None, breaks no rule; values
within an object have to be there or not be named. A rule may rely on those before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.bench.fields import shown

if TYPE_CHECKING:
    from forerun.bench.results import Manifest, Record

LARGEST = 1e15  # no count, size or rate of a run comes near it
SHORTEST, LONGEST = 1e-6, 1e9  # seconds of a record
ROUNDED = 1.01  # how far parts, each rounded, may exceed the whole
HEADROOM = ("examined", "accepted", "best", "unknown")
LENGTH = "#"  # in a path: of how many entries
ROWS = re.compile("[1-9][0-9]{0,14}")  # of a cost curve, as JSON has them


@dataclass(frozen=True)
class Rule:
    """What the values at some paths take, in words and as a test of a value and its part."""

    paths: tuple[str, ...]  # as limits.read_gb_s; "*" is every entry, "#" their number
    takes: str  # {0.name}: what the part has under that name
    holds: Callable[[Any, Any], bool]


def between(low: float, high: float, *paths: str) -> Rule:
    """Numbers, both ends allowed; NaN is none."""
    words = f"finite numbers from {low:g} to {high:g}"
    return Rule(paths, words, lambda x, _: _is_number(x) and low <= x <= high)


def counts(low: int, *paths: str) -> Rule:
    """Whole numbers that JSON may give another type."""
    words = f"whole numbers from {low} to {LARGEST:g}"
    return Rule(paths, words, lambda x, _: _is_number(x, int) and low <= x <= LARGEST)


def above_0(*paths: str) -> Rule:
    """Numbers that something is divided by."""
    words = f"finite numbers above 0, at most {LARGEST:g}"
    return Rule(paths, words, lambda x, _: _is_number(x) and 0 < x <= LARGEST)


def of_type(kind: Any, words: str, *paths: str) -> Rule:
    """Values that JSON may give another type."""
    return Rule(paths, words, lambda x, _: isinstance(x, kind))


def _is_number(value: Any, kind: Any = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


SAMPLE = (
    between(0, LARGEST, "tokens", "passes", "drafted", "accepted", "examined"),
    between(0, LARGEST, "per_position.*", "seconds.*"),
    between(0, 1, "score"),
    Rule(("passes",), "1 or more, as there are tokens", lambda x, s: x > 0 or s.tokens == 0),
    Rule(
        ("accepted",),
        "at most 'drafted', {0.drafted}",
        lambda x, s: s.drafted is None or x <= s.drafted,
    ),
    Rule(
        ("accepted",),
        "at most 'examined', {0.examined}",
        lambda x, s: s.examined is None or x <= s.examined,
    ),
    Rule(
        ("per_position",),
        "counts that add up to 'accepted', {0.accepted}",
        lambda x, s: not x or s.accepted in (None, sum(x)),
    ),
)
RECORD = (
    between(0, LARGEST, "index", "round", "order", "num_prompt_tokens", "generated", "group"),
    between(0, LARGEST, "seconds", "prefill_seconds", "memory.*", "limits.*", "headroom.*"),
    between(0, 1, "score", "majority"),
    above_0("limits.read_gb_s"),
    Rule(("headroom",), ", ".join(HEADROOM), lambda x, _: x.keys() == {*HEADROOM}),
    Rule(
        ("headroom.accepted", "headroom.best"),
        "at most what was examined, {0.headroom[examined]}",
        lambda x, r: x <= r.headroom["examined"] * ROUNDED,
    ),
)
TIMED = (  # of records without an error, and of others that tell seconds
    between(SHORTEST, LONGEST, "seconds"),
    Rule(("prefill_seconds",), "less than 'seconds', {0.seconds}", lambda x, r: x < r.seconds),
    Rule(
        ("seconds",),
        "at least what the parts of its samples take, {0.claimed:.6g}",
        lambda x, r: r.claimed <= x * ROUNDED,
    ),
)
FINISHED = (  # of records without an error
    between(1, LARGEST, f"samples.{LENGTH}"),
    Rule(
        ("generated",),
        "the sum of its samples, {0.sampled}",
        lambda x, r: x == r.sampled or not r.samples,
    ),
)
MANIFEST = (
    counts(1, "threads", "rounds", f"tasks.{LENGTH}"),
    counts(0, "turns", "peers.*.restarts", "resumed.*.again", "peer_memory.*.*"),
    Rule(("seed",), "whole numbers from 0", lambda x, _: x >= 0),
    Rule(
        ("tasks.*",),
        "an object with 'examples' and 'hash'",
        lambda x, _: x.keys() >= {"examples", "hash"},
    ),
    counts(1, "tasks.*.examples", "tasks.*.in_file", "tasks.*.size", "tasks.*.max_new_tokens"),
    counts(0, "tasks.*.left_out"),
    Rule(
        ("suite",),
        "an object with the texts 'name', 'mode' and 'half'",
        lambda x, _: all(isinstance(x.get(key), str) for key in ("name", "mode", "half")),
    ),
    between(0, LARGEST, "model.parameters", "model.weight_bytes", "model.context"),
    between(0, LARGEST, "model.pass_bytes", "model.kv_bytes_per_token", "model.flops_per_row"),
    between(0, LARGEST, "machine.cores", "machine.memory", "machine.cache_bytes"),
    of_type(str, "texts", "model.path", "model.name", "model.hash", "tasks.*.hash", "tasks.*.task"),
    of_type(str, "texts", "machine.cpu", "machine.gpu", "machine.device", "machine.kernels"),
    of_type(dict | str, "an object of versions, or why it was left out", "peers.*"),
    Rule(
        ("cost_curve",),
        "rows as names, whole numbers above 0",
        lambda x, _: all(map(ROWS.fullmatch, x)),
    ),
    above_0("limits.*", "cost_curve.*"),
    Rule(("methods",), "one method or more, each once", lambda x, _: 0 < len(x) == len(set(x))),
)


def impossible(record: Record, run: Manifest | None = None) -> str:
    """The first thing that no run, or not this one, can have counted, "" if there is none.

    As ": field 'x' takes ..." or ", sample 0: field 'x' takes ...".
    """
    of_record, of_sample = of_run(run, record.task) if run else ((), ())
    for i, sample in enumerate(record.samples):
        if found := broken(sample, SAMPLE + of_sample):
            return f", sample {i}: {found}"
    rules = RECORD + of_record
    rules += TIMED if record.seconds or record.error is None else ()
    rules += FINISHED if record.error is None else ()
    found = broken(record, rules)
    return found and f": {found}"


def of_run(run: Manifest, task: str) -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
    """Rules for the records of one task in a run, and for their samples: what there was to do."""
    n, longest = run.sampling.get("n"), run.sampling.get("max_new_tokens", LARGEST)
    longest = run.tasks.get(task, {}).get("max_new_tokens", longest)
    sizes = {
        name: found.get("size", found["examples"] + found.get("left_out", 0))
        for name, found in run.tasks.items()
    }
    record = (
        Rule(("task",), "the name of a task of run.json", lambda x, _: x in sizes),
        Rule(("method",), "the name of a method of run.json", lambda x, _: x in run.methods),
        Rule(
            ("index",),
            "numbers below that of the task's prompts in run.json",
            lambda x, r: x < sizes[r.task],
        ),
        Rule(
            ("round",),
            f"numbers below the {run.rounds} 'rounds' of run.json",
            lambda x, _: x < run.rounds,
        ),
        Rule(
            (f"samples.{LENGTH}",),
            f"{n}, the n of run.json",
            lambda x, r: r.error is not None or n in (None, x),
        ),
    )
    most = f"at most the 'max_new_tokens' of run.json, {longest}"
    return record, (Rule(("tokens", "passes"), most, lambda x, _: x <= longest),)


def broken(part: Any, rules: Iterable[Rule]) -> str:
    """What breaks the first rule that does not hold, as "field 'x' takes ..., got ..."; or ""."""
    for rule in rules:
        for path in rule.paths:
            for name, value in at(part, path):
                if not rule.holds(value, part):
                    return f"field {name} takes {rule.takes.format(part)}, got {shown(value)}"
    return ""


def at(part: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What stands at a path, with its name for people; nothing where that is not told."""
    field, *keys = path.split(".")
    value = getattr(part, field)
    if value is not None:
        yield from _within(repr(field), value, keys)


def _within(name: str, value: Any, keys: list[str]) -> Iterator[tuple[str, Any]]:
    if not keys:
        yield name, value
    elif keys[0] == LENGTH:
        yield f"{name}: their number", len(value)
    elif isinstance(value, Mapping | list):
        entries = value if isinstance(value, Mapping) else dict(enumerate(value))
        for key in entries if keys[0] == "*" else entries.keys() & {keys[0]}:
            yield from _within(f"{name}: {key!r}", entries[key], keys[1:])
