"""pass@k: the probability that at least one of k answers to a problem is right.

The estimator is the unbiased one of Evaluating Large Language Models Trained on Code (2021): with c
of n samples right, 1 - C(n - c, k) / C(n, k), the mean over problems.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import comb

from forerun.bench.results import Manifest, Record
from forerun.tasks import is_pass_fail


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The estimate for one problem; k must be at most the number of samples."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be 1 to {num_samples}, the number of samples, got {k}")
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def passes(manifest: Manifest, task: str, records: Iterable[Record]) -> dict[int, float]:
    """pass@k by k, of one method on one task: k = 1, 2, 4, ... and the number of samples.

    Samples of a problem in several rounds count together. Empty for a task with partial scores, and
    where a problem has one sample or a score is unknown.
    """
    if not is_pass_fail(manifest.tasks[task].get("task", task)):
        return {}
    scores: dict[int, list[float | None]] = {}
    for record in records:
        if record.error is None:
            scores.setdefault(record.index, []).extend(one.score for one in record.samples)
    if not all(score in (0.0, 1.0) for some in scores.values() for score in some):
        return {}
    fewest = min(map(len, scores.values()), default=0)
    if fewest < 2:
        return {}
    counts = [(len(some), sum(score == 1.0 for score in some)) for some in scores.values()]
    return {k: _mean([pass_at_k(n, right, k) for n, right in counts]) for k in _steps(fewest)}


def _steps(most: int) -> list[int]:
    """1, 2, 4, ... below `most`, and `most`."""
    return [*(2**i for i in range((most - 1).bit_length())), most]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
