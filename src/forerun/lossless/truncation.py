"""Which tokens top-k, top-p and min-p admit, and whether rounding may have moved that border.

A pass over a tree and a pass over one row round differently, so in half precision a token at the
border may be in for one and out for the other. Comparing a sample with the set of the other pass
would call an honest method wrong, in both directions: it drew what is out, or never what is in. So
a law is cut where the pass that drew the sample cut it, provided that rounding explains the move.
Probabilities stay those of the plain pass: only the border is taken over.
"""

from __future__ import annotations

import numpy as np

from forerun.core.records import Step
from forerun.core.sampling import Sampling, softmax, to_probs


def cuts(sampling: Sampling) -> bool:
    """Whether the parameters leave tokens out by their probability."""
    return bool(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p)


class Borders:
    """Listener: the set of admitted tokens behind every emitted token, as bits, by trajectory."""

    def __init__(self) -> None:
        self.of: dict[int, list[bytes]] = {}
        self._known: dict[bytes, bytes] = {}  # equal sets share one object

    def __call__(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            if cuts(seq.sampling):
                sets = (np.packbits(step.laws[i][node] > 0).tobytes() for node in step.visited(i))
                mine = self.of.setdefault(seq.index, [])
                mine += [self._known.setdefault(bits, bits) for bits in sets]


def law_within(
    logits: np.ndarray, sampling: Sampling, bits: bytes, tolerance: float
) -> tuple[np.ndarray, bool]:
    """The law [V] of plain logits [V], cut to the set of another pass if rounding explains it.

    Returns the law and whether it was cut differently. Sets that logits within the tolerance cannot
    give are not taken over: a token outside then has probability 0.
    """
    law = to_probs(logits, sampling)
    kept = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(logits)).astype(bool)
    if ((law > 0) == kept).all() or not is_explained(logits, law > 0, kept, sampling, tolerance):
        return law, False
    probs = np.where(kept, softmax(logits, sampling.temperature), 0)
    return probs / probs.sum(), True


def is_explained(
    logits: np.ndarray, own: np.ndarray, kept: np.ndarray, sampling: Sampling, tolerance: float
) -> bool:
    """Whether logits within the tolerance of these [V] can turn the set `own` into `kept`."""
    if sampling.top_k and kept.sum() > sampling.top_k:
        return False
    entered, left = np.flatnonzero(kept & ~own), np.flatnonzero(own & ~kept)
    exact = logits.astype(np.float64)
    return (  # those that have the longest way; the others pass the border before them
        not len(entered) or may_enter(exact, entered[exact[entered].argmin()], sampling, tolerance)
    ) and (not len(left) or may_leave(exact, left[exact[left].argmax()], sampling, tolerance))


def may_enter(logits: np.ndarray, token: int, sampling: Sampling, tolerance: float) -> bool:
    """Whether a token is admitted under the logits within the tolerance that favour it most.

    It rises, what stays above it falls, and what can be brought behind it comes right behind.
    """
    top = logits[token] + tolerance
    low, high = logits - tolerance, logits + tolerance
    most = np.where(low > top, low, np.minimum(high, top))
    most[token] = np.nextafter(top, np.inf)
    return bool(to_probs(most, sampling)[token] > 0)


def may_leave(logits: np.ndarray, token: int, sampling: Sampling, tolerance: float) -> bool:
    """Whether a token is left out under the logits within the tolerance that favour it least."""
    bottom = logits[token] - tolerance
    low, high = logits - tolerance, logits + tolerance
    least = np.where(high > bottom, high, low)
    least[token] = bottom
    return bool(to_probs(least, sampling)[token] == 0)
