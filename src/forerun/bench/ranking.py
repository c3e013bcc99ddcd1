"""Who is the fastest on the same prompts, and who cannot be told apart from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from forerun.bench import metrics
from forerun.bench.charts import number
from forerun.bench.metrics import PLAIN, SpeedUp, Totals
from forerun.bench.results import Manifest, Record, examples_of

VAGUE = 4  # times the lower end of an interval: with an upper end beyond it no factor is told


def kind_of(method: str, manifest: Manifest) -> str:
    """Whose method it is: "plain", "own", or "peer"."""
    if method == PLAIN:
        return "plain"
    heads = {name.partition(":")[0] for name in manifest.peers}
    return "peer" if method.partition(":")[0] in heads else "own"


def skipped(manifest: Manifest) -> dict[str, str]:
    """Peers that could not take part or broke too often, and why."""
    return {name: why for name, why in manifest.peers.items() if isinstance(why, str)}


def awaited(manifest: Manifest) -> list[str]:
    """Methods that take part to the end."""
    absent = skipped(manifest)
    return [method for method in manifest.methods if method not in absent]


def incomplete(manifest: Manifest, records: Sequence[Record]) -> str:
    """How many of the planned measurements are there, and whose are missing; "" where all are.

    Plain decoding is planned once, and again for every prompt of a later group of peers.
    """
    each = sum(examples_of(told)[0] for told in manifest.tasks.values()) * manifest.rounds
    methods = awaited(manifest)
    there = Counter(r.method for r in records if r.method != PLAIN or r.group == 0)
    missing = {m: each - there[m] for m in methods if there[m] < each}
    again = {r.pair_key for r in records if r.group and r.method != PLAIN and r.method in methods}
    if PLAIN in methods and (lost := again - {r.pair_key for r in records if r.method == PLAIN}):
        missing[PLAIN] = missing.get(PLAIN, 0) + len(lost)
    if not missing:
        return ""
    planned = each * len(methods) + (len(again) if PLAIN in methods else 0)
    found = planned - sum(missing.values())
    return f"{found} of {planned} planned measurements are there; missing: {listed(missing)}"


def listed(counts: Mapping[str, int]) -> str:
    """ "plain 2, stand 3"."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def by_method(manifest: Manifest, records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of every planned method."""
    return {m: [r for r in records if r.method == m] for m in manifest.methods}


def finished(records: Iterable[Record]) -> frozenset[tuple[str, int]]:
    """Prompts, as (task, index), that were finished at least once."""
    return frozenset((r.task, r.index) for r in records if r.error is None)


def counts(timed: int, done: int) -> str:
    """ "9 of 10": prompts whose time counts, of those that were finished; "10" if it is all."""
    return str(done) if timed == done else f"{timed} of {done}"


@dataclass(frozen=True)
class Entry:
    """One method on some prompts: its records, and what follows from them."""

    method: str
    kind: str
    records: Sequence[Record]  # its own, failed ones too
    timed: Sequence[Record]  # those of them whose time counts
    baseline: Sequence[Record]  # of plain decoding, whose time counts

    @cached_property
    def speed(self) -> SpeedUp | None:
        """Over plain decoding, prefill included."""
        return metrics.ratios(self.timed, self.baseline)

    @cached_property
    def bare(self) -> SpeedUp | None:
        """Over plain decoding, prefill taken off on both sides."""
        return metrics.ratios(self.timed, self.baseline, prefill=False)

    @cached_property
    def totals(self) -> Totals:
        return metrics.totals(metrics.samples_of(self.records))

    @cached_property
    def compared(self) -> Sequence[Record]:
        """The records that `speed` rests on; without one, all whose time counts."""
        return metrics.compared(self.timed, self.baseline)

    @property
    def rate(self) -> float | None:
        """Tokens per second, prefill included."""
        return metrics.tokens_per_second(self.compared)

    @cached_property
    def finished(self) -> frozenset[tuple[str, int]]:
        """The prompts that it finished at least once."""
        return finished(self.records)

    @property
    def prompts(self) -> int:
        return len(self.finished)

    @property
    def timed_prompts(self) -> int:
        """Of these, those whose time counts: towards `speed`, where there is one."""
        return len(finished(self.compared))

    @property
    def is_sound(self) -> bool:
        """Whether it has finished something and failed on nothing."""
        return bool(self.records) and all(r.error is None for r in self.records)


class Standing:
    """All methods on the same prompts, and who is the fastest."""

    def __init__(
        self, manifest: Manifest, records: Sequence[Record], timed: Sequence[Record] | None = None
    ) -> None:
        """timed: the records whose time counts; all if not given."""
        self.records, self.timed = records, records if timed is None else timed
        here, quiet = by_method(manifest, records), by_method(manifest, self.timed)
        plain = quiet.get(PLAIN, [])
        self.entries = [
            Entry(m, kind_of(m, manifest), own, quiet[m], plain) for m, own in here.items() if own
        ]
        self._over: dict[tuple[str, str], SpeedUp | None] = {}
        self.has_baseline = any(e.method == PLAIN and e.prompts for e in self.entries)

    def best(self, *kinds: str) -> Entry | None:
        """The fastest of these kinds, of those that are ranked."""
        able = [e for e in self.entries if self.is_ranked(e) and (not kinds or e.kind in kinds)]
        return max(able, key=self.pace, default=None)

    @cached_property
    def required(self) -> frozenset[tuple[str, int]]:
        """Prompts that every method without a failure finished: in a run that is not done, some
        are a prompt ahead of others."""
        sound = [e.finished for e in self.entries if e.is_sound]
        most = max((e.finished for e in self.entries), key=len, default=frozenset())
        return frozenset.intersection(*sound) if sound else most

    def is_ranked(self, entry: Entry) -> bool:
        """Whether it finished all prompts that a place depends on."""
        return bool(entry.finished) and entry.finished >= self.required

    def pace(self, entry: Entry) -> float:
        """What methods are ranked by."""
        if self.has_baseline:
            return entry.speed.ratio if entry.speed else 0.0
        return entry.rate or 0.0

    def plain_alike(self, own: Entry) -> Entry | None:
        """Plain decoding of as many answers at once, beside a method that decodes several."""
        name = f"{PLAIN}:{metrics.at_once(own.method)}"
        return next((e for e in self.entries if e.method == name and e is not own), None)

    def over(self, here: Entry, there: Entry) -> SpeedUp | None:
        """How many times faster one is than another, on the prompts of both.

        Of two that did not run at the same time: the quotient of their speed-ups over plain
        decoding, each of its own time.
        """
        pair = here.method, there.method
        if pair not in self._over:
            groups = [{record.group for record in entry.timed} for entry in (here, there)]
            self._over[pair] = (
                metrics.quotient(here.speed, there.speed)
                if groups[0].isdisjoint(groups[1])
                else metrics.ratios(here.timed, there.timed)
            )
        return self._over[pair]

    @cached_property
    def places(self) -> dict[str, str]:
        """By method: "fastest", "tied" with it, or ""."""
        first = self.best()
        return {} if first is None else {e.method: self._place(e, first) for e in self.entries}

    def _place(self, entry: Entry, first: Entry) -> str:
        if entry is first:
            return "fastest"
        found = self.over(entry, first) if self.is_ranked(entry) else None
        return "tied" if found and (holds_one(found) or _did_as(first, entry)) else ""


def _did_as(first: Entry, entry: Entry) -> bool:
    """Whether the first drafted nothing, so that it did what plain decoding, the other one, did."""
    name = ":".join(filter(None, (PLAIN, metrics.at_once(first.method))))
    return first.kind == "own" and first.totals.drafted == 0 and entry.method == name


def holds_one(speed: SpeedUp) -> bool:
    """Whether the interval leaves open which of the two is faster."""
    return speed.interval is not None and speed.interval[0] <= 1 <= speed.interval[1]


def is_vague(speed: SpeedUp) -> bool:
    """Whether the interval is so wide that the factor within it says nothing."""
    return speed.interval is not None and speed.interval[1] > VAGUE * speed.interval[0]


def times(speed: SpeedUp | None) -> str:
    """ "2.07x (2.01 to 2.14)"."""
    return "-" if speed is None else factor(speed.ratio) + interval(speed)


def factor(value: float) -> str:
    """ "2.07x"; three digits of what is small or large; a dash for what is no number."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.2f}x" if 0.1 <= value < 10 else f"{number(value)}x"


def interval(speed: SpeedUp) -> str:
    """The 95 % interval in brackets; nothing for a single prompt."""
    if speed.interval is None:
        return ""
    return f" ({span(*speed.interval)})"


def span(low: float, high: float) -> str:
    """ "2.01 to 2.14"."""
    return " to ".join(factor(end).removesuffix("x") for end in (low, high))
