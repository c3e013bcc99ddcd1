"""Which tokens top_k, top_p and min_p keep of a distribution.

Of a large vocabulary only the tokens above a border are sorted or partitioned. The border falls
until enough of them are above it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

TOP_P_SLACK = 1e-9  # a sum that rounding leaves just below p suffices
FIRST_BORDER, BORDER_FACTOR, MAX_BORDERS = 1 / 64, 1 / 64, 4  # shares of the largest probability


def truncated(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The ids that top_k, then top_p, then min_p keep of probabilities [V]."""
    ids = None  # all
    if 0 < top_k < len(probs):
        ids = _top_k(probs, top_k)
    if top_p < 1.0:
        kept = probs if ids is None else _normalised(probs[ids])
        found = _top_p(kept, top_p)
        ids = found if ids is None else ids[found]
    if min_p > 0.0:
        left = probs if ids is None else probs[ids]
        high = np.flatnonzero(left >= min_p * left.max())
        ids = high if ids is None else ids[high]
    return np.arange(len(probs)) if ids is None else ids  # all: top_k is at least V


def _top_k(probs: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest, ascending; among ties the lowest ids."""
    top = next((top for top in _tops(probs) if len(top) >= k), None)
    top = np.arange(len(probs)) if top is None else top
    border = np.partition(probs[top], -k)[-k]
    above, ties = top[probs[top] > border], top[probs[top] == border]
    return np.sort(np.concatenate([above, ties[: k - len(above)]]))


def _top_p(probs: np.ndarray, p: float) -> np.ndarray:
    """Ids, ascending, of the smallest set of largest probabilities with a sum of at least p."""
    order = _descending(probs, p)
    sums = np.cumsum(probs[order], dtype=np.float64)
    size = min(int(np.searchsorted(sums, p - TOP_P_SLACK)) + 1, len(order))
    return np.sort(order[:size])


def _descending(probs: np.ndarray, p: float) -> np.ndarray:
    """Ids by descending probability, ties by id, at least as many as needed to reach mass p.

    Sorts only the ids above a border, which falls until they have the mass.
    """
    for top in _tops(probs):
        if probs[top].sum(dtype=np.float64) > p:
            return top[np.argsort(-probs[top], kind="stable")]
    return np.argsort(-probs, kind="stable")


def _tops(probs: np.ndarray) -> Iterator[np.ndarray]:
    """Growing sets of ids, ascending, each of all probabilities above a border."""
    border = probs.max() * FIRST_BORDER
    for _ in range(MAX_BORDERS):
        yield np.flatnonzero(probs >= border)
        border *= BORDER_FACTOR


def _normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()
