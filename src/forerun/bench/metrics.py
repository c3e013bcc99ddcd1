"""What is computed from the records of a run, one definition each (docs/structure.md).

S verify passes, D drafted tokens, A accepted draft tokens, E examined tokens, G generated tokens.
tau = G / S, acceptance rate A / D, examined rate A / E, rate at position i: accepted at depth i
over S. A figure that a contestant does not tell is None, never 0.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.bench.results import Record, SampleRecord

PLAIN = "plain"  # the baseline: our own decoding without drafts
GROUPS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64))  # trajectories, from 1
DRAWS = 2000  # of the bootstrap
FEW = 10  # values, below which a bootstrap interval is too narrow
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom, up to FEW - 2
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)
RESTLESS = 1.5  # how often the reading speed beside a record goes into that of quiet moments
TAKEN = 0.1  # how much more of the cores is lost beside a record than in quiet moments
NEAR = 2  # records: how far what one lacked of the cores tells of others
PARTS = ("draft", "forward", "verify", "other")


@dataclass(frozen=True)
class Totals:
    """Counts of many samples added up; None where one of them does not tell."""

    generated: int = 0  # G
    passes: int | None = 0  # S
    drafted: int | None = 0  # D
    accepted: int | None = 0  # A
    examined: int | None = 0  # E
    accepted_at: Counter[int] = field(default_factory=Counter)  # depth from 1 -> count

    @property
    def tau(self) -> float | None:
        """Tokens per pass, the correction or bonus token counted."""
        return ratio(self.generated, self.passes)

    @property
    def acceptance_rate(self) -> float | None:
        return ratio(self.accepted, self.drafted)

    @property
    def examined_rate(self) -> float | None:
        return ratio(self.accepted, self.examined)

    @property
    def per_position(self) -> list[float]:
        """Accepted at depth i over S, i from 1."""
        if not self.passes:
            return []
        deepest = max(self.accepted_at, default=0)
        return [self.accepted_at[i] / self.passes for i in range(1, deepest + 1)]

    @property
    def predicted_tau(self) -> float | None:
        """1 + the sum of the rates by position: tau if no text ended within its last pass."""
        return 1.0 + sum(self.per_position) if self.passes else None


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below; None where either is unknown or nothing was counted."""
    return None if above is None or not below else above / below


def totals(samples: Iterable[SampleRecord]) -> Totals:
    """S, D, A, E, G and counts by position of many samples."""
    found = list(samples)
    at: Counter[int] = Counter()
    for sample in found:
        at.update({i: count for i, count in enumerate(sample.per_position, start=1) if count})
    names = ("passes", "drafted", "accepted", "examined")
    counts = {name: _sum(getattr(sample, name) for sample in found) for name in names}
    return Totals(sum(sample.tokens for sample in found), accepted_at=at, **counts)


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(v for v in known if v is not None)


def samples_of(records: Iterable[Record]) -> list[SampleRecord]:
    """All samples of the records that did not fail."""
    return [sample for record in records if record.error is None for sample in record.samples]


def at_once(method: str) -> str:
    """The option "batch=16" of a method of ours whose passes several sequences share, else ""."""
    found = re.search(r"\bbatch=(?!1\b)\w+", method)
    return found[0] if found else ""


def calm(records: Sequence[Record]) -> list[Record]:
    """Records whose time no disturbance spoiled, in the same order.

    What time does not enter (counts, rates, scores) all records tell, so every method is told by
    the same prompts. Nothing spoils those that took turns. First those go that were short of
    memory, then those that lacked cores, then those whose memory was slow; where less than half of
    what some method did of a task would be left, that is how the machine is, and nothing more of
    that task goes.
    """
    kept = list(records)
    short = [record.is_short_of_memory for record in records]
    for spoiled in short, crowded(records), starved(records):
        pairs = zip(records, spoiled, strict=True)
        bad = {id(r) for r, is_bad in pairs if is_bad and not r.is_shared}
        left, all_ = (
            Counter((r.task, r.method) for r in some if r.error is None)
            for some in ([r for r in kept if id(r) not in bad], records)
        )
        whole = {key[0] for key, count in all_.items() if 2 * left[key] < count}
        kept = [r for r in kept if r.task in whole or id(r) not in bad]
    return kept


def disturbed(records: Sequence[Record]) -> list[bool]:
    """Of each record, whether the machine was busy or short of memory.

    No rule looks at the method, but long records meet more of it than short ones.
    """
    pairs = zip(records, busy(records), strict=True)
    return [is_busy or (r.error is None and r.is_short_of_memory) for r, is_busy in pairs]


def busy(records: Sequence[Record]) -> list[bool]:
    """Of each record, whether the machine was not quiet; those that failed tell no time."""
    return [a or b for a, b in zip(crowded(records), starved(records), strict=True)]


def crowded(records: Sequence[Record]) -> list[bool]:
    """Of each record, whether it lacked TAKEN more of the cores than in the run's quiet moments.

    These are the 10th percentile; 0 where less than a tenth of the records tell. A record that is
    too short to tell lacked what one before it and one after it lacked, at most NEAR away.
    """
    takes = beside(records, "taken")
    are_told = len(takes) >= 0.1 * len(records) > 0
    most = (float(np.quantile(takes, 0.1)) if are_told else 0.0) + TAKEN
    told = [(r.limits or {}).get("taken") for r in records]
    lacks = [
        min(_first(told[i::-1][: NEAR + 1]), _first(told[i : i + NEAR + 1]))
        for i in range(len(told))
    ]
    return [r.error is None and lack > most for r, lack in zip(records, lacks, strict=True)]


def _first(values: Iterable[float | None]) -> float:
    """The first that is told, else 0."""
    return next((value for value in values if value is not None), 0.0)


def starved(records: Sequence[Record]) -> list[bool]:
    """Of each record, whether memory was slow before it or before the next one.

    Slow: read at less than 1 / RESTLESS of the run's quiet speed, its 90th percentile.
    """
    reads = beside(records, "read_gb_s")
    least = float(np.quantile(reads, 0.9)) / RESTLESS if reads else 0.0
    slow = [(r.limits or {}).get("read_gb_s", least) < least for r in records]
    pairs = zip(records, slow, [*slow, False][1:], strict=True)
    return [r.error is None and (before or after) for r, before, after in pairs]


def beside(records: Iterable[Record], name: str) -> list[float]:
    """What was measured beside the records, where it was."""
    return [r.limits[name] for r in records if r.limits and name in r.limits]


def by_trajectory(records: Iterable[Record]) -> dict[str, Totals]:
    """Totals of trajectories 1, 2, 3-4, 5-8, ... over prompts."""
    groups: dict[str, list[SampleRecord]] = {}
    for record in records:
        if record.error is None:
            for number, sample in enumerate(record.samples, start=1):
                groups.setdefault(group_of(number), []).append(sample)
    return {name: totals(samples) for name, samples in groups.items()}


def kind_name(category: str) -> str:
    """What a level or a category is called: "level 3", "writing"."""
    return f"level {category}" if category.isdecimal() else category


def group_of(number: int) -> str:
    """The name of the group of a trajectory, counted from 1."""
    for low, high in GROUPS:
        if low <= number <= high:
            return str(low) if low == high else f"{low}-{high}"
    return f"{GROUPS[-1][1] + 1}+"


def time_split(records: Iterable[Record]) -> dict[str, float]:
    """Seconds of draft, forward, verify, other, and outside: wall time that no part claims.

    Only of records whose samples all tell their times; empty if there are none.
    """
    known = [record for record in records if tells_parts(record)]
    if not known:
        return {}
    split = dict.fromkeys(PARTS, 0.0)
    for record in known:
        for sample in record.samples:
            for name, seconds in sample.seconds.items():
                split[name] = split.get(name, 0.0) + seconds
    split["outside"] = max(sum(r.seconds for r in known) - sum(split.values()), 0.0)
    return split


def tells_parts(record: Record) -> bool:
    """Whether it finished, and all its samples tell what their time went to."""
    samples = record.samples
    return record.error is None and bool(samples) and all(sample.seconds for sample in samples)


def cut(records: Iterable[Record]) -> tuple[int, int]:
    """How many answers the limit of tokens ended before a full score, and how many have a score."""
    scored = [sample for sample in samples_of(records) if sample.score is not None]
    ended = [sample for sample in scored if sample.finish == "length"]
    return sum((sample.score or 0.0) < 1 for sample in ended), len(scored)


def tokens_per_second(records: Sequence[Record], *, prefill: bool = True) -> float | None:
    """G over wall seconds of records that did not fail.

    prefill False: the passes that computed the prompts are taken off the seconds (the token that
    such a pass yields stays counted); None if one of the records does not tell them, or if no
    answer has a second token, as nothing but those passes was done.
    """
    done = [record for record in records if record.error is None]
    if not done or (not prefill and any(r.prefill_seconds is None for r in done)):
        return None
    if not prefill and all(r.generated <= len(r.samples) for r in done):
        return None
    taken = 0.0 if prefill else sum(r.prefill_seconds or 0.0 for r in done)
    seconds = sum(record.seconds for record in done) - taken
    return sum(record.generated for record in done) / seconds if seconds > 0 else None


@dataclass(frozen=True)
class SpeedUp:
    """How many times faster than the baseline on the same prompts."""

    ratio: float  # geometric mean over prompts
    interval: tuple[float, float] | None  # 95 %, as `interval` has it; None for one prompt
    by_prompt: dict[tuple[str, int], float]  # (task, index) -> ratio, rounds pooled

    @property
    def prompts(self) -> int:
        return len(self.by_prompt)


def speed_up(
    records: Iterable[Record], method: str, baseline: str = PLAIN, *, prefill: bool = True
) -> SpeedUp | None:
    """Tokens per second of a method over the baseline's; None if they share no prompt."""
    found = list(records)
    return ratios(
        [r for r in found if r.method == method],
        [r for r in found if r.method == baseline],
        prefill=prefill,
    )


def ratios(
    here: Iterable[Record], there: Iterable[Record], *, prefill: bool = True
) -> SpeedUp | None:
    """Tokens per second here over there, prompt by prompt; only prompts and rounds of both.

    Peers that did not run at the same time are in different groups and never paired.
    """
    sides = [{r.pair_key: r for r in side if r.error is None} for side in (here, there)]
    both = sorted(sides[0].keys() & sides[1].keys())
    rounds: dict[tuple[str, int], list[tuple[str, int, int, int]]] = {}
    for key in both:
        rounds.setdefault(key[:2], []).append(key)
    by_prompt: dict[tuple[str, int], float] = {}
    for prompt, keys in rounds.items():
        rates = [tokens_per_second([side[key] for key in keys], prefill=prefill) for side in sides]
        found = ratio(rates[0], rates[1])
        if found:
            by_prompt[prompt] = found
    return speed_of(by_prompt)


def speed_of(by_prompt: dict[tuple[str, int], float]) -> SpeedUp | None:
    """The speed-up of ratios by prompt; None without any."""
    values = list(by_prompt.values())
    return SpeedUp(geometric_mean(values), interval(values), by_prompt) if values else None


def quotient(here: SpeedUp | None, there: SpeedUp | None) -> SpeedUp | None:
    """One speed-up over another, prompt by prompt; None if they share no prompt."""
    if here is None or there is None:
        return None
    both = sorted(here.by_prompt.keys() & there.by_prompt.keys())
    return speed_of({prompt: here.by_prompt[prompt] / there.by_prompt[prompt] for prompt in both})


def compared(here: Sequence[Record], there: Iterable[Record]) -> Sequence[Record]:
    """Those of `here` that a speed-up over `there` rests on; without one, all."""
    done = {r.pair_key for r in there if r.error is None}
    both = [r for r in here if r.error is None and r.pair_key in done]
    return both or here


def geometric_mean(values: Sequence[float] | np.ndarray) -> float:
    """exp of the mean logarithm of positive values."""
    return float(np.exp(np.mean(np.log(values))))


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the geometric mean of positive values; None for fewer than two of them.

    Percentiles of a bootstrap, the same every time; of fewer than FEW values, whose spread that
    shows too little, Student's t of their logarithms.
    """
    if (count := len(values)) < 2:
        return None
    logs = np.log(np.asarray(values, dtype=float))
    if count < FEW:
        middle, error = logs.mean(), logs.std(ddof=1) / math.sqrt(count)
        ends = np.array([middle - STUDENT[count - 2] * error, middle + STUDENT[count - 2] * error])
    else:
        picks = np.random.default_rng(0).integers(0, count, (DRAWS, count))
        ends = np.quantile(logs[picks].mean(axis=1), (0.025, 0.975))
    low, high = np.exp(ends)
    return float(low), float(high)


def mean_score(records: Iterable[Record], field_name: str = "score") -> float | None:
    """Mean of "score" (single samples) or "majority" over prompts that were scored."""
    found = [getattr(r, field_name) for r in records if r.error is None]
    scores = [score for score in found if score is not None]
    return sum(scores) / len(scores) if scores else None


def peak_memory(records: Iterable[Record]) -> dict[str, int]:
    """The largest bytes of every part."""
    peak: dict[str, int] = {}
    for record in records:
        for part, size in record.memory.items():
            peak[part] = max(peak.get(part, 0), size)
    return peak
