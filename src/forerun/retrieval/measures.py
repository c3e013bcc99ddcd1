"""Ranking metrics: accuracy@k, R-precision, and bootstrap intervals over queries."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many

import numpy as np

from forerun.errors import DataError
from forerun.utils.numbers import whole


def accuracy(ranked: Many[int] | np.ndarray, relevant: Collection[int], k: int) -> float:
    """accuracy@k: 1 if one of the first k is relevant, else 0."""
    k = whole("k", k)
    return float(any(int(d) in relevant for d in ranked[:k]))


def r_precision(ranked: Many[int] | np.ndarray, relevant: Collection[int]) -> float:
    """The share of relevant documents among the first R; R: number of relevant documents."""
    if not relevant:
        return 0.0
    return sum(int(d) in relevant for d in ranked[: len(relevant)]) / len(relevant)


def interval(
    values: Many[float] | np.ndarray, *, draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """The mean and its 95 % bootstrap interval (2.5 and 97.5 % quantiles)."""
    given = np.asarray(values, float)
    if given.ndim != 1 or not len(given) or not np.isfinite(given).all():
        raise DataError(f"expected a list of finite values, got {values!r:.80}")
    whole("draws", draws)
    chosen = np.random.default_rng(seed).integers(0, len(given), (draws, len(given)))
    low, high = np.quantile(given[chosen].mean(axis=1), [0.025, 0.975])
    return float(given.mean()), float(low), float(high)
