"""Methods ranked by speed on the same prompts, with ties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from forerun.bench import metrics
from forerun.bench.formatting import counts_by_name
from forerun.bench.metrics import PLAIN, SpeedUp, Totals
from forerun.bench.results import Manifest, Record, num_examples
from forerun.bench.scoring import last_line

NOT_MEASURED = "not measured yet"


def kind_of(method: str, manifest: Manifest) -> str:
    """ "plain", "own" or "peer"."""
    if method == PLAIN:
        return "plain"
    heads = {name.partition(":")[0] for name in manifest.peers}
    return "peer" if method.partition(":")[0] in heads else "own"


def skipped(manifest: Manifest) -> dict[str, str]:
    """Peers that could not start or failed too often -> the reason."""
    return {name: why for name, why in manifest.peers.items() if isinstance(why, str)}


def expected_methods(manifest: Manifest) -> list[str]:
    """The planned methods that were not skipped."""
    absent = skipped(manifest)
    return [method for method in manifest.methods if method not in absent]


def left_out_line(manifest: Manifest, records: Sequence[Record]) -> str:
    """The methods that finished none of the prompts, with their reasons; "" if there are none."""
    done = {r.method for r in records if r.error is None}
    reasons = {r.method: r.error for r in records if r.error} | skipped(manifest)
    methods_of: dict[str, list[str]] = {}
    for method in manifest.methods:
        if method not in done:
            reason = last_line(reasons.get(method, NOT_MEASURED)).strip().rstrip(".")
            methods_of.setdefault(reason, []).append(method)
    parts = [f"{', '.join(methods)} ({reason})" for reason, methods in methods_of.items()]
    return f"Left out: {'; '.join(parts)}." if parts else ""


def incomplete(manifest: Manifest, records: Sequence[Record]) -> str:
    """Count of planned measurements that exist, and of the missing ones; "" if all exist.

    Plain decoding is planned once, and again for every prompt of a later group of peers.
    """
    each = sum(num_examples(task)[0] for task in manifest.tasks.values()) * manifest.rounds
    methods = expected_methods(manifest)
    found = Counter(r.method for r in records if r.method != PLAIN or r.group == 0)
    missing = {m: each - found[m] for m in methods if found[m] < each}
    again = {r.pair_key for r in records if r.group and r.method != PLAIN and r.method in methods}
    if PLAIN in methods and (lost := again - {r.pair_key for r in records if r.method == PLAIN}):
        missing[PLAIN] = missing.get(PLAIN, 0) + len(lost)
    if not missing:
        return ""
    planned = each * len(methods) + (len(again) if PLAIN in methods else 0)
    done = planned - sum(missing.values())
    return f"{done} of {planned} planned measurements exist; missing: {counts_by_name(missing)}"


def finished(records: Iterable[Record]) -> frozenset[tuple[str, int]]:
    """Prompts, as (task, index), that were finished at least once."""
    return frozenset((r.task, r.index) for r in records if r.error is None)


@dataclass(frozen=True)
class Entry:
    """One method on some prompts: its records and their figures."""

    method: str
    kind: str
    records: Sequence[Record]  # of the method, failures included
    timed: Sequence[Record]  # those of them that count in times
    baseline: Sequence[Record]  # of plain decoding, that count in times

    @cached_property
    def speed(self) -> SpeedUp | None:
        """Over plain decoding, prefill included."""
        return metrics.paired_speed_up(self.timed, self.baseline)

    @cached_property
    def decode_speed(self) -> SpeedUp | None:
        """Over plain decoding, prefill subtracted on both sides."""
        return metrics.paired_speed_up(self.timed, self.baseline, prefill=False)

    @cached_property
    def totals(self) -> Totals:
        return metrics.totals(metrics.samples_of(self.records))

    @cached_property
    def compared(self) -> Sequence[Record]:
        """The records behind `speed`; without a speed-up, all that count in times."""
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
        """The prompts behind `speed`, or else those that count in times."""
        return len(finished(self.compared))

    @property
    def has_no_failure(self) -> bool:
        return bool(self.records) and all(r.error is None for r in self.records)


class Ranking:
    """All methods on the same prompts, the fastest, and those tied with it."""

    def __init__(
        self, manifest: Manifest, records: Sequence[Record], timed: Sequence[Record] | None = None
    ) -> None:
        """timed: the records that count in times; all if not given."""
        self.records, self.timed = records, records if timed is None else timed
        plain = [r for r in self.timed if r.method == PLAIN]
        self.entries = []
        for name in manifest.methods:
            mine, quiet = ([r for r in rs if r.method == name] for rs in (records, self.timed))
            if mine:
                self.entries.append(Entry(name, kind_of(name, manifest), mine, quiet, plain))
        self._ratios: dict[tuple[str, str], SpeedUp | None] = {}
        self.measured = [entry for entry in self.entries if entry.prompts]
        self.has_baseline = any(e.method == PLAIN for e in self.measured)

    def best(self, *kinds: str) -> Entry | None:
        """The fastest ranked entry of these kinds; of all kinds if none is given."""
        ranked = [e for e in self.entries if self.is_ranked(e) and (not kinds or e.kind in kinds)]
        return max(ranked, key=self.score, default=None)

    @cached_property
    def required(self) -> frozenset[tuple[str, int]]:
        """Prompts that a ranked method must have finished: those of all methods without failure."""
        complete = [e.finished for e in self.entries if e.has_no_failure]
        most = max((e.finished for e in self.entries), key=len, default=frozenset())
        return frozenset.intersection(*complete) if complete else most

    def is_ranked(self, entry: Entry) -> bool:
        """Whether it finished all required prompts."""
        return bool(entry.finished) and entry.finished >= self.required

    def score(self, entry: Entry) -> float:
        """Speed-up over plain decoding; tokens per second without a baseline."""
        if self.has_baseline:
            return entry.speed.ratio if entry.speed else 0.0
        return entry.rate or 0.0

    def plain_with_same_batch(self, entry: Entry) -> Entry | None:
        """Plain decoding of as many answers at once as a batched method."""
        name = f"{PLAIN}:{metrics.batch_option(entry.method)}"
        return next((e for e in self.entries if e.method == name and e is not entry), None)

    def over(self, here: Entry, there: Entry) -> SpeedUp | None:
        """Speed of one method over another, on the prompts of both.

        Methods of different groups: the quotient of their speed-ups over plain decoding.
        """
        pair = here.method, there.method
        if pair not in self._ratios:
            groups = [{record.group for record in entry.timed} for entry in (here, there)]
            self._ratios[pair] = (
                metrics.quotient(here.speed, there.speed)
                if groups[0].isdisjoint(groups[1])
                else metrics.paired_speed_up(here.timed, there.timed)
            )
        return self._ratios[pair]

    @cached_property
    def places(self) -> dict[str, str]:
        """Method -> "fastest", "tied" or ""."""
        first = self.best()
        return {} if first is None else {e.method: self._place(e, first) for e in self.entries}

    def _place(self, entry: Entry, first: Entry) -> str:
        if entry is first:
            return "fastest"
        ratio = self.over(entry, first) if self.is_ranked(entry) else None
        return "tied" if ratio and (is_tie(ratio) or _is_plain_of(entry, first)) else ""


def _is_plain_of(entry: Entry, own: Entry) -> bool:
    """Whether `own` drafted nothing and `entry` is plain decoding with the same batch."""
    name = ":".join(filter(None, (PLAIN, metrics.batch_option(own.method))))
    return own.kind == "own" and own.totals.drafted == 0 and entry.method == name


def is_tie(speed: SpeedUp) -> bool:
    """Whether the interval contains 1."""
    return speed.interval is not None and speed.interval[0] <= 1 <= speed.interval[1]
