"""N-gram weights for a query (SEAL, section "LM+FM").

P_u = (F + s) / (N + s) is an n-gram's unconditional probability, F its count in N tokens. P_q is
the model's probability of it given the query. The weight is the log odds ratio of P_q to P_u,
clipped at 0, to the power alpha.
"""

from __future__ import annotations

import numpy as np

from forerun.utils.jit import compiled
from forerun.utils.numbers import finite, whole

LOGP_MARGIN = 1e-10  # keeps log P below 0, so that log(1 - P) is finite


def weights(
    logps: np.ndarray, counts: np.ndarray, tokens: int, *, smoothing: float = 5, alpha: float = 2.0
) -> np.ndarray:
    """Weights w from log P_q [m], counts F [m] and N = `tokens`. float64 [m].

    w = max(0, [log P_q + log(1 - P_u)] - [log P_u + log(1 - P_q)]) ** alpha
    """
    whole("tokens", tokens)
    finite("smoothing", smoothing, 0, is_open=True)
    finite("alpha", alpha, 0, is_open=True)
    log_u = np.log((np.asarray(counts, float) + smoothing) / (tokens + smoothing))
    log_u = np.minimum(log_u, -LOGP_MARGIN)
    log_q = np.minimum(np.asarray(logps, float), -LOGP_MARGIN)
    odds = log_q + _log_complement(log_u) - log_u - _log_complement(log_q)
    return np.maximum(odds, 0.0) ** alpha


def _log_complement(logp: np.ndarray) -> np.ndarray:
    """log(1 - exp(logp))."""
    return np.log(-np.expm1(logp))


@compiled
def cover(new: int, size: int, beta: float = 0.8) -> float:
    """The factor 1 - beta + beta new / size of a weight.

    `new` of the n-gram's `size` distinct tokens are in no other credited n-gram of the document.
    """
    return 1 - beta + beta * new / size
