"""How much an n-gram says about a document, given a query (SEAL, section "LM+FM").

P_u = (F + s) / (N + s) is how likely an n-gram is anyhow, F its count among N tokens; P_q is the
model's probability of it given the query. Its weight is the logarithm of the odds ratio of the two,
clipped at 0, to the power alpha.
"""

from __future__ import annotations

import numpy as np
from numba import njit

ALMOST = 1e-10  # kept off log P_q, whose complement has a logarithm too


def weights(
    logps: np.ndarray, counts: np.ndarray, tokens: int, *, smoothing: float = 5, alpha: float = 2.0
) -> np.ndarray:
    """w of n-grams with log P_q [m] and counts F [m] among N = `tokens`. float64 [m].

    w = max(0, [log P_q + log(1 - P_u)] - [log P_u + log(1 - P_q)]) ** alpha
    """
    log_u = np.log((np.asarray(counts, float) + smoothing) / (tokens + smoothing))
    log_u = np.minimum(log_u, -ALMOST)
    log_q = np.minimum(np.asarray(logps, float), -ALMOST)
    odds = log_q + _log_complement(log_u) - log_u - _log_complement(log_q)
    return np.maximum(odds, 0.0) ** alpha


def _log_complement(logp: np.ndarray) -> np.ndarray:
    """log(1 - exp(logp))."""
    return np.log(-np.expm1(logp))


@njit(cache=True, nogil=True)
def cover(new: int, size: int, beta: float = 0.8) -> float:
    """What of a weight counts if `new` of an n-gram's `size` different tokens are new.

    1 - beta + beta new / size: an n-gram that repeats what others of the document have said adds
    little.
    """
    return 1 - beta + beta * new / size
