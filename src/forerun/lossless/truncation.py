"""Truncation by top-k, top-p and min-p, and whether rounding explains a different set of tokens.

A tree pass and a one-row pass round differently, so in half precision a token at the border may be
kept by one and cut by the other. Comparing a sample with the set of the other pass would report
errors that are none. So a distribution is truncated to the set of the pass that drew the sample, if
rounding explains the difference. Probabilities stay those of the plain pass.
"""

from __future__ import annotations

import numpy as np

from forerun.core.records import Step
from forerun.core.sampling import Sampling, softmax, to_probs


class KeptSets:
    """Listener: the set of kept tokens at every emitted token, as bits, by trajectory."""

    def __init__(self) -> None:
        self.of: dict[int, list[bytes]] = {}
        self._known: dict[bytes, bytes] = {}  # equal sets share one object

    def __call__(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            if seq.sampling.truncates:
                sets = (np.packbits(step.laws[i][node] > 0).tobytes() for node in step.visited(i))
                mine = self.of.setdefault(seq.index, [])
                mine += [self._known.setdefault(bits, bits) for bits in sets]


def law_within(
    logits: np.ndarray, sampling: Sampling, bits: bytes, tolerance: float
) -> tuple[np.ndarray, bool]:
    """The distribution [V] of plain logits [V], truncated to the set of another pass if rounding
    explains it; and whether the set differs.

    Sets that logits within the tolerance cannot give are ignored: a token outside the plain set
    then has probability 0.
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
    """Whether logits within the tolerance of these [V] can give the set `kept` instead of `own`."""
    if sampling.top_k and kept.sum() > sampling.top_k:
        return False
    entered, left = np.flatnonzero(kept & ~own), np.flatnonzero(own & ~kept)
    exact = logits.astype(np.float64)
    return (  # the tokens farthest from the border decide
        not len(entered) or may_enter(exact, entered[exact[entered].argmin()], sampling, tolerance)
    ) and (not len(left) or may_leave(exact, left[exact[left].argmax()], sampling, tolerance))


def may_enter(logits: np.ndarray, token: int, sampling: Sampling, tolerance: float) -> bool:
    """Whether the most favourable logits within the tolerance keep a token.

    It rises, tokens that stay above it fall, and the others move right below it.
    """
    top = logits[token] + tolerance
    low, high = logits - tolerance, logits + tolerance
    most = np.where(low > top, low, np.minimum(high, top))
    most[token] = np.nextafter(top, np.inf)
    return bool(to_probs(most, sampling)[token] > 0)


def may_leave(logits: np.ndarray, token: int, sampling: Sampling, tolerance: float) -> bool:
    """Whether the least favourable logits within the tolerance exclude a token."""
    bottom = logits[token] - tolerance
    low, high = logits - tolerance, logits + tolerance
    least = np.where(high > bottom, high, low)
    least[token] = bottom
    return bool(to_probs(least, sampling)[token] == 0)
