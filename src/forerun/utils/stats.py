"""Goodness-of-fit tests of samples, correction for multiple tests, AUC, and majority vote.

Each sample may have its own distribution. Its randomised rank u is the probability of all more
likely tokens plus a uniform share of its own. u is uniform on [0, 1] if the sample follows its
distribution, so samples from different contexts form one test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cache

import numpy as np

MIN_EXPECTED = 25  # expected samples in a bin
EXCLUDED = 2.0  # rank of a token of probability 0


def ranks(law: np.ndarray, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Randomised ranks [n] of tokens [n] under `law` [V]; EXCLUDED where `law` is 0."""
    law = law / law.sum()
    order = np.argsort(-law, kind="stable")
    before = np.empty(len(law))
    before[order] = np.cumsum(law[order]) - law[order]
    u = before[tokens] + rng.random(len(tokens)) * law[tokens]
    return np.where(law[tokens] > 0, np.minimum(u, 1.0), EXCLUDED)


def fit(u: np.ndarray, shape: np.ndarray) -> tuple[int, float, float]:
    """Number of bins, statistic and p-value of randomised ranks u [n].

    shape: a distribution [V] in descending order; its cumulative sums are the candidate bin edges.
    For samples of one distribution it is that distribution, so a bin is a token or a run of rare
    tokens. Neighbours are merged until a bin expects MIN_EXPECTED samples. One EXCLUDED token
    gives a p-value of 0.
    """
    if (u == EXCLUDED).any():
        return 1, math.inf, 0.0
    edges, start = [0.0], 0.0
    for edge in np.cumsum(shape):
        if min(edge - start, 1 - edge) * len(u) >= MIN_EXPECTED:
            start = float(edge)
            edges.append(start)
    counts = np.histogram(u, bins=[*edges, 1.0])[0]
    return len(counts), *likelihood_ratio(counts, np.diff([*edges, 1.0]))


def likelihood_ratio(counts: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """G statistic with Williams' correction, and its p-value, of counts [k] under `law` [k] > 0.

    Unlike Pearson's statistic, its tail is accurate for skewed distributions.
    """
    n, k = counts.sum(), len(counts)
    if k < 2:
        return 0.0, 1.0
    seen = counts > 0
    g = 2 * float((counts[seen] * np.log(counts[seen] / (n * law[seen]))).sum())
    g = max(0.0, g) / (1 + ((1 / law).sum() - 1) / (6 * n * (k - 1)))
    return g, chi_square_tail(g, k - 1)


def chi_square_tail(x: float, degrees: int) -> float:
    """Probability that a chi-square variable exceeds x."""
    import torch

    half = torch.tensor([degrees / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def noncentral_tail(x: float, degrees: int, noncentrality: float) -> float:
    """Probability that a noncentral chi-square variable exceeds x: a Poisson mixture of tails."""
    import torch

    half = noncentrality / 2
    reach = 10 * math.sqrt(half + 1) + 20
    extra = torch.arange(max(0, int(half - reach)), int(half + reach) + 1, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(extra, torch.tensor(half)) - half - torch.lgamma(extra + 1))
    tails = torch.special.gammaincc(degrees / 2 + extra, torch.full_like(extra, x / 2))
    return float((weights * tails).sum())


@cache
def noncentrality(num_bins: int, level: float, power: float) -> float:
    """The noncentrality at which a chi-square test of this level has this power."""
    degrees = num_bins - 1
    critical = _root(lambda x: chi_square_tail(x, degrees) - level)
    return _root(lambda size: power - noncentral_tail(critical, degrees, size))


def detectable(num_samples: int, num_bins: int, level: float, power: float = 0.8) -> float:
    """The smallest total variation d over the bins that the test finds with this power.

    With expected e and sum |r - e| = 2 d, the noncentrality is n sum (r - e)^2 / e, which is at
    least 4 n d^2 (Cauchy-Schwarz, as e sums to 1). 1 if nothing can be found.
    """
    if num_bins < 2 or not num_samples:
        return 1.0
    return min(1.0, math.sqrt(noncentrality(num_bins, level, power) / (4 * num_samples)))


def samples_for(deviation: float, num_bins: int, level: float, power: float = 0.8) -> int:
    """The number of samples that makes a deviation `detectable` with this number of bins."""
    return math.ceil(noncentrality(max(num_bins, 2), level, power) / (4 * deviation**2))


def _root(falling: Callable[[float], float]) -> float:
    """Where a falling function of x >= 0 crosses 0, by bisection."""
    low, high = 0.0, 1.0
    while falling(high) > 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high


def holm(p_values: Many[float]) -> list[float]:
    """The p-values corrected for multiple tests (Holm's step-down method)."""
    corrected, worst = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = worst
    return corrected


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve; ties count half; labels in [0, 1] are shares of positives."""
    _, at = np.unique(scores, return_inverse=True)
    yes, no = np.bincount(at, labels), np.bincount(at, 1 - labels)
    below = np.cumsum(no) - no
    return float((yes * (below + no / 2)).sum() / (yes.sum() * no.sum()))


def majority(answers: Many[str | None]) -> str | None:
    """The most common answer, the first one on ties; None if there is none."""
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0][0] if votes else None
