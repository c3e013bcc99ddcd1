"""Resampling of weighted particles: which particle each of n places gets.

Law: particle i gets n w_i places in expectation, so no rule biases an estimate; they differ in
variance.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from forerun.core.dice import Dice

Resample = Callable[[np.ndarray, Dice], list[int]]  # weights [n] that sum to 1 -> n indices


def stratified(weights: np.ndarray, dice: Dice) -> list[int]:
    """One uniform in each of n equal parts of [0, 1)."""
    n, sums = len(weights), _sums(weights)
    borders = np.arange(n + 1) / n
    return [
        dice.choice(np.diff(np.clip(sums, low, high)))
        for low, high in zip(borders[:-1], borders[1:], strict=True)
    ]


def systematic(weights: np.ndarray, dice: Dice) -> list[int]:
    """The uniforms u + i / n with one common u in [0, 1 / n)."""
    n, sums = len(weights), _sums(weights)
    cuts = np.unique(np.concatenate([[0.0, 1.0 / n], (sums * n) % 1.0 / n]))
    chosen = dice.choice(np.diff(cuts))  # between two cuts the indices do not depend on u
    points = (cuts[chosen] + cuts[chosen + 1]) / 2 + np.arange(n) / n
    return (np.searchsorted(sums, points, side="right") - 1).tolist()


def multinomial(weights: np.ndarray, dice: Dice) -> list[int]:
    """n independent draws."""
    return [dice.choice(weights) for _ in weights]


def residual(weights: np.ndarray, dice: Dice) -> list[int]:
    """floor(n w_i) copies of each, the rest drawn from what is left of n w_i."""
    expected = len(weights) * weights
    counts = np.floor(expected).astype(int)
    left = expected - counts
    drawn = [dice.choice(left) for _ in range(len(weights) - int(counts.sum()))]
    return [*np.repeat(np.arange(len(weights)), counts).tolist(), *drawn]


def _sums(weights: np.ndarray) -> np.ndarray:
    """0 and the cumulative sums, [n + 1]; the last one is 1."""
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    sums[-1] = 1.0
    return np.minimum(sums, 1.0)


RESAMPLING: dict[str, Resample] = {
    "stratified": stratified,
    "systematic": systematic,
    "multinomial": multinomial,
    "residual": residual,
}
