"""Borders of top-k, top-p and min-p move as far as rounding can move them, and no further."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.core.sampling import Sampling, to_probs
from forerun.lossless import truncation

LOGITS = np.log([0.4, 0.3, 0.15, 0.1, 0.05])


def bits(*kept: int) -> bytes:
    return np.packbits(np.isin(np.arange(5), kept)).tobytes()


@pytest.mark.parametrize(
    ("sampling", "kept", "gap"),
    [
        (Sampling(top_k=2), (0, 2), np.log(0.3 / 0.15)),
        (Sampling(min_p=0.3), (0, 1), np.log(0.15 / 0.12)),
        (Sampling(min_p=0.3), (0, 1, 2, 3), np.log(0.12 / 0.1)),
        (Sampling(temperature=0.5, min_p=0.1), (0, 1), np.log(0.15 / 0.4) - np.log(0.1) / 2),
    ],
)
def test_a_border_moves_as_far_as_rounding_can_move_two_logits(
    sampling: Sampling, kept: tuple[int, ...], gap: float
) -> None:
    for tolerance, is_moved in ((0.49 * gap, False), (0.51 * gap, True)):
        law, moved = truncation.law_within(LOGITS, sampling, bits(*kept), tolerance)
        assert moved == is_moved
        expected = np.exp(LOGITS / sampling.temperature) * np.isin(np.arange(5), kept)
        if not moved:
            expected = to_probs(LOGITS, sampling)
        np.testing.assert_allclose(law, expected / expected.sum(), atol=1e-12)


def test_top_p_moves_with_the_mass_that_rounding_moves() -> None:
    """0.7 reaches p = 0.69; logits within 0.02 bring it to 0.6916 at least, within 0.03 below p."""
    sampling = Sampling(top_p=0.69)
    assert not truncation.law_within(LOGITS, sampling, bits(0, 1, 2), 0.02)[1]
    assert truncation.law_within(LOGITS, sampling, bits(0, 1, 2), 0.03)[1]
    assert not truncation.law_within(LOGITS, sampling, bits(0), 0.03)[1]


def test_no_rounding_explains_more_tokens_than_top_k() -> None:
    assert not truncation.law_within(LOGITS, Sampling(top_k=2), bits(0, 1, 2), 9.0)[1]
    assert truncation.law_within(LOGITS, Sampling(top_k=2), bits(3, 4), 9.0)[1]
