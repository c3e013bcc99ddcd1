"""Figures of tables: means over seeds with intervals, ratios of tau, and lines on goals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scripts import Row

from forerun.bench.metrics import STUDENT

SHOWN, OPPOSITE = "effect shown", "opposite effect"
NOT_SHOWN = "mechanism verified, effect not shown"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds, and half of its 95 % interval (Student's t; infinite for one seed)."""
    given, num = np.asarray(values, float), len(values)
    if num < 2:
        return float(given.mean()), math.inf
    factor = STUDENT[num - 2] if num - 2 < len(STUDENT) else 1.96
    return float(given.mean()), float(factor * given.std(ddof=1) / math.sqrt(num))


def cell(values: Sequence[float]) -> str:
    """The mean over seeds with its interval, or the value of one seed."""
    mean, half = spread(values)
    return f"{mean:.3f} ± {half:.3f}" if math.isfinite(half) else f"{mean:.3f}"


def tau_of(rows: Sequence[Row]) -> float:
    """Tokens per pass of runs of `Bench.decoded`."""
    return sum(sum(r["tokens"]) for r in rows) / sum(sum(r["passes"]) for r in rows)


def ratio(rows: Sequence[Row], others: Sequence[Row]) -> tuple[float, float, float]:
    """tau over that of other runs on the same prompts, with a 95 % bootstrap over prompts."""
    sums = [
        np.array([np.sum([r[name] for r in some], axis=0) for name in ("tokens", "passes")])
        for some in (rows, others)
    ]

    def quotient(picks: Any) -> Any:
        (tokens, passes), (tokens_2, passes_2) = (s[:, picks].sum(-1) for s in sums)
        return tokens / passes / (tokens_2 / passes_2)

    num = sums[0].shape[1]
    picks = np.random.default_rng(0).integers(0, num, (2000, num))
    low, high = np.quantile(quotient(picks), (0.025, 0.975))
    return float(quotient(np.arange(num))), float(low), float(high)


def goal(text: str, values: Sequence[float], least: float = 0.0) -> str:
    """A line on a goal: the mean difference over seeds has to be above `least` with its interval.

    The effect is opposite if the interval lies below 0. One seed shows nothing.
    """
    mean, half = spread(values)
    word = SHOWN if mean - half > least else OPPOSITE if mean + half < 0 else NOT_SHOWN
    return f"- {text[0].upper()}{text[1:]}: {cell(values)}; {word}."


def seeds_of(num: int) -> str:
    """How many seeds a table has, in words of a caption."""
    return f"{num} seeds, mean ± half of the 95 % interval" if num > 1 else "one seed"
