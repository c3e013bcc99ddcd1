"""What a run can have written: laws of its manifest, its records and their samples, as tables.

A law is about what stands at a path of such a part. What is not told, None, breaks no law; values
within an object have to be there or not be named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.bench.fields import shown

if TYPE_CHECKING:
    from forerun.bench.results import Manifest

MOST = 1e15  # no count, size or rate of a run comes near it
SHORTEST, LONGEST = 1e-6, 1e9  # seconds of a record
ROUNDED = 1.01  # how far parts, each rounded, may exceed the whole
HEADROOM = ("examined", "accepted", "best", "unknown")
LENGTH = "#"  # in a path: of how many entries


@dataclass(frozen=True)
class Law:
    """What the values at some paths take, in words and as a test of a value and its part."""

    paths: tuple[str, ...]  # as limits.read_gb_s; "*" is every entry, "#" their number
    takes: str  # {0.name}: what the part has under that name
    holds: Callable[[Any, Any], bool]


def between(low: float, high: float, *paths: str) -> Law:
    """Numbers, both ends allowed; NaN is none."""
    words = f"finite numbers from {low:g} to {high:g}"
    return Law(paths, words, lambda x, _: _is_number(x) and low <= x <= high)


def above_0(*paths: str) -> Law:
    """Numbers that something is divided by."""
    words = f"finite numbers above 0, at most {MOST:g}"
    return Law(paths, words, lambda x, _: _is_number(x) and 0 < x <= MOST)


def of_type(kind: Any, words: str, *paths: str) -> Law:
    """Values that JSON may give another type."""
    return Law(paths, words, lambda x, _: isinstance(x, kind))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


SAMPLE = (
    between(0, MOST, "tokens", "passes", "drafted", "accepted", "examined"),
    between(0, MOST, "per_position.*", "seconds.*"),
    between(0, 1, "score"),
    Law(("passes",), "1 or more, as there are tokens", lambda x, s: x > 0 or s.tokens == 0),
    Law(
        ("accepted",),
        "at most 'drafted', {0.drafted}",
        lambda x, s: s.drafted is None or x <= s.drafted,
    ),
    Law(
        ("accepted",),
        "at most 'examined', {0.examined}",
        lambda x, s: s.examined is None or x <= s.examined,
    ),
    Law(
        ("per_position",),
        "counts that add up to 'accepted', {0.accepted}",
        lambda x, s: not x or s.accepted in (None, sum(x)),
    ),
)
RECORD = (
    between(0, MOST, "index", "round", "order", "num_prompt_tokens", "generated"),
    between(0, MOST, "seconds", "prefill_seconds", "memory.*", "limits.*", "headroom.*"),
    between(0, 1, "score", "majority"),
    above_0("limits.read_gb_s"),
    Law(("headroom",), ", ".join(HEADROOM), lambda x, _: x.keys() == {*HEADROOM}),
    Law(
        ("headroom.accepted", "headroom.best"),
        "at most what was examined, {0.headroom[examined]}",
        lambda x, r: x <= r.headroom["examined"] * ROUNDED,
    ),
)
TIMED = (  # of records whose seconds are told, not 0
    between(SHORTEST, LONGEST, "seconds"),
    Law(("prefill_seconds",), "less than 'seconds', {0.seconds}", lambda x, r: x < r.seconds),
    Law(
        ("seconds",),
        "at least what the parts of its samples take, {0.claimed:.6g}",
        lambda x, r: r.claimed <= x * ROUNDED,
    ),
)
FINISHED = (  # of records without an error
    between(1, MOST, f"samples.{LENGTH}"),
    Law(
        ("generated",),
        "the sum of its samples, {0.sampled}",
        lambda x, r: x == r.sampled or not r.samples,
    ),
)
MANIFEST = (
    between(1, MOST, "threads", "rounds", "tasks.*.examples"),
    between(0, float("inf"), "seed"),
    between(0, MOST, "turns", "tasks.*.left_out", "tasks.*.in_file", "peers.*.restarts"),
    between(0, MOST, "model.parameters", "model.weight_bytes", "model.context"),
    between(0, MOST, "model.pass_bytes", "model.kv_bytes_per_token", "model.flops_per_row"),
    between(0, MOST, "machine.cores", "machine.memory", "machine.cache_bytes"),
    above_0("limits.*", "cost_curve.*"),
    of_type(str, "texts", "model.path", "model.name", "model.hash", "machine.cpu", "machine.gpu"),
    of_type(str, "texts", "machine.device", "machine.kernels"),
    of_type(dict | str, "an object of versions, or why it was left out", "peers.*"),
    Law(
        ("cost_curve",),
        "rows as names, whole numbers above 0",
        lambda x, _: all(name.isdecimal() and int(name) for name in x),
    ),
    Law(("methods",), "one method or more, each once", lambda x, _: 0 < len(x) == len(set(x))),
    between(1, MOST, f"tasks.{LENGTH}"),
)


def of_run(run: Manifest) -> tuple[tuple[Law, ...], tuple[Law, ...]]:
    """Laws of the records of one run, and of their samples: how much there was to do."""
    n, longest = run.sampling.get("n"), run.sampling.get("max_new_tokens", MOST)
    counts = {name: t.get("examples", MOST) + t.get("left_out", 0) for name, t in run.tasks.items()}
    record = (
        Law(
            ("index",),
            "numbers below that of the task's prompts in run.json",
            lambda x, r: x < counts.get(r.task, MOST),
        ),
        Law(
            ("round",),
            f"numbers below the {run.rounds} 'rounds' of run.json",
            lambda x, _: x < run.rounds,
        ),
        Law(
            (f"samples.{LENGTH}",),
            f"{n}, the n of run.json",
            lambda x, r: r.error is not None or n in (None, x),
        ),
    )
    most = f"at most the 'max_new_tokens' of run.json, {longest}"
    return record, (Law(("tokens", "passes"), most, lambda x, _: x <= longest),)


def broken(part: Any, laws: Iterable[Law]) -> Iterator[str]:
    """What breaks a law, each as "field 'x' takes ..., got ..."."""
    for law in laws:
        for path in law.paths:
            for name, value in at(part, path):
                if not law.holds(value, part):
                    yield f"field {name} takes {law.takes.format(part)}, got {shown(value)}"


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
