"""Metrics of a run's records: counts, rates, speeds, speed-ups and their intervals.

S verify passes, D drafted tokens, A accepted draft tokens, E examined tokens, G generated tokens.
tau = (G + C) / S with C tokens cut off by stop strings, acceptance rate A / D, examined rate A / E,
rate at position i: accepted at depth i over S. A figure that a contestant does not report is None,
never 0.
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
NUM_BOOTSTRAP_DRAWS = 2000
MIN_BOOTSTRAP_VALUES = 10  # with fewer values a bootstrap interval is too narrow
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom, up to MIN_BOOTSTRAP_VALUES - 2
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)
PARTS = ("draft", "forward", "verify", "other")


@dataclass(frozen=True)
class Totals:
    """Summed counts of samples; None if one of them is unknown."""

    generated: int = 0  # G
    passes: int | None = 0  # S
    drafted: int | None = 0  # D
    accepted: int | None = 0  # A
    examined: int | None = 0  # E
    accepted_at: Counter[int] = field(default_factory=Counter)  # depth from 1 -> count
    cut: int = 0  # C

    @property
    def tau(self) -> float | None:
        """Tokens per pass, the correction or bonus token counted."""
        return ratio(self.generated + self.cut, self.passes)

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
    """above / below; None if either is unknown or `below` is 0."""
    return None if above is None or not below else above / below


def totals(samples: Iterable[SampleRecord]) -> Totals:
    """S, D, A, E, G and counts by position of many samples."""
    found = list(samples)
    at: Counter[int] = Counter()
    for sample in found:
        at.update({i: count for i, count in enumerate(sample.per_position, start=1) if count})
    names = ("passes", "drafted", "accepted", "examined")
    counts = {name: _sum(getattr(sample, name) for sample in found) for name in names}
    generated, cut = (sum(getattr(one, name) for one in found) for name in ("tokens", "cut"))
    return Totals(generated, accepted_at=at, cut=cut, **counts)


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(v for v in known if v is not None)


def samples_of(records: Iterable[Record]) -> list[SampleRecord]:
    """All samples of the records that did not fail."""
    return [sample for record in records if record.error is None for sample in record.samples]


def batch_option(method: str) -> str:
    """The option "batch=16" of a local method with a shared batch, otherwise ""."""
    found = re.search(r"\bbatch=(?!1\b)\w+", method)
    return found[0] if found else ""


def by_trajectory(records: Iterable[Record]) -> dict[str, Totals]:
    """Totals of trajectories 1, 2, 3-4, 5-8, ... over prompts."""
    groups: dict[str, list[SampleRecord]] = {}
    for record in records:
        if record.error is None:
            for number, sample in enumerate(record.samples, start=1):
                groups.setdefault(group_of(number), []).append(sample)
    return {name: totals(samples) for name, samples in groups.items()}


def category_name(category: str) -> str:
    """The name of a level or category: "level 3", "writing"."""
    return f"level {category}" if category.isdecimal() else category


def group_of(number: int) -> str:
    """The name of the group of a trajectory, counted from 1."""
    for low, high in GROUPS:
        if low <= number <= high:
            return str(low) if low == high else f"{low}-{high}"
    return f"{GROUPS[-1][1] + 1}+"


def time_split(records: Iterable[Record]) -> dict[str, float]:
    """Seconds of draft, forward, verify, other, and outside: wall time outside all parts.

    Covers only records that report the times of all their samples; empty if there are none.
    """
    known = [record for record in records if has_time_parts(record)]
    if not known:
        return {}
    split = dict.fromkeys(PARTS, 0.0)
    for record in known:
        for sample in record.samples:
            for name, seconds in sample.seconds.items():
                split[name] = split.get(name, 0.0) + seconds
    split["outside"] = max(sum(r.seconds for r in known) - sum(split.values()), 0.0)
    return split


def has_time_parts(record: Record) -> bool:
    """Whether it finished and all its samples report their seconds by part."""
    samples = record.samples
    return record.error is None and bool(samples) and all(sample.seconds for sample in samples)


def truncated(records: Iterable[Record]) -> tuple[int, int]:
    """(answers cut by the token limit without a full score, scored answers)."""
    scored = [sample for sample in samples_of(records) if sample.score is not None]
    ended = [sample for sample in scored if sample.finish == "length"]
    return sum((sample.score or 0.0) < 1 for sample in ended), len(scored)


def tokens_per_second(records: Sequence[Record], *, prefill: bool = True) -> float | None:
    """G over wall seconds of records that did not fail.

    prefill False: subtracts the seconds of the passes that computed the prompts; the token that
    such a pass yields stays counted. None if a record does not report them, or if no answer has a
    second token.
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
    """Speed over a baseline on the same prompts."""

    ratio: float  # geometric mean over prompts
    interval: tuple[float, float] | None  # 95 %; None for one prompt
    by_prompt: dict[tuple[str, int], float]  # (task, index) -> ratio, rounds pooled

    @property
    def prompts(self) -> int:
        return len(self.by_prompt)


def speed_up(
    records: Iterable[Record], method: str, baseline: str = PLAIN, *, prefill: bool = True
) -> SpeedUp | None:
    """Tokens per second of a method over those of the baseline; None without a common prompt."""
    found = list(records)
    return paired_speed_up(
        [r for r in found if r.method == method],
        [r for r in found if r.method == baseline],
        prefill=prefill,
    )


def paired_speed_up(
    here: Iterable[Record], there: Iterable[Record], *, prefill: bool = True
) -> SpeedUp | None:
    """Tokens per second here over there, prompt by prompt, over prompts and rounds of both.

    Records of different peer groups are never paired.
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
    """The speed-up of ratios by prompt; None if there are none."""
    values = list(by_prompt.values())
    return SpeedUp(geometric_mean(values), interval(values), by_prompt) if values else None


def quotient(here: SpeedUp | None, there: SpeedUp | None) -> SpeedUp | None:
    """One speed-up over another, prompt by prompt; None without a common prompt."""
    if here is None or there is None:
        return None
    both = sorted(here.by_prompt.keys() & there.by_prompt.keys())
    return speed_of({prompt: here.by_prompt[prompt] / there.by_prompt[prompt] for prompt in both})


def compared(here: Sequence[Record], there: Iterable[Record]) -> Sequence[Record]:
    """The records of `here` that are paired with one of `there`; all, if none is."""
    done = {r.pair_key for r in there if r.error is None}
    both = [r for r in here if r.error is None and r.pair_key in done]
    return both or here


def geometric_mean(values: Sequence[float] | np.ndarray) -> float:
    """exp of the mean logarithm of positive values."""
    return float(np.exp(np.mean(np.log(values))))


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the geometric mean of positive values; None for fewer than two.

    Percentiles of a seeded bootstrap; below MIN_BOOTSTRAP_VALUES values, Student's t of the
    logarithms.
    """
    if (count := len(values)) < 2:
        return None
    logs = np.log(np.asarray(values, dtype=float))
    if count < MIN_BOOTSTRAP_VALUES:
        middle, error = logs.mean(), logs.std(ddof=1) / math.sqrt(count)
        ends = np.array([middle - STUDENT[count - 2] * error, middle + STUDENT[count - 2] * error])
    else:
        picks = np.random.default_rng(0).integers(0, count, (NUM_BOOTSTRAP_DRAWS, count))
        ends = np.quantile(logs[picks].mean(axis=1), (0.025, 0.975))
    low, high = np.exp(ends)
    return float(low), float(high)


def mean_score(records: Iterable[Record], field_name: str = "score") -> float | None:
    """Mean of "score" (single samples) or "majority" over prompts that were scored."""
    found = [getattr(r, field_name) for r in records if r.error is None]
    scores = [score for score in found if score is not None]
    return sum(scores) / len(scores) if scores else None


def peak_memory(records: Iterable[Record]) -> dict[str, int]:
    """The largest size of every part, in bytes."""
    peak: dict[str, int] = {}
    for record in records:
        for part, size in record.memory.items():
            peak[part] = max(peak.get(part, 0), size)
    return peak
