"""A chain: as long as the plan lets it, and no longer than q makes its tokens likely."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import TableSource, sequence
from forerun.core.dice import SeededDice
from forerun.core.records import Plan
from forerun.core.tree import IID
from forerun.drafters.base import Grown
from forerun.growers.chain import Chain

SURE, UNSURE = np.array([0.9, 0.05, 0.05]), np.array([0.5, 0.25, 0.25])


def law(tokens: list[int]) -> np.ndarray:
    """Sure of the first two tokens, unsure of all later ones."""
    return SURE if len(tokens) < 4 else UNSURE


@pytest.mark.parametrize(
    ("least", "length"), [(0.0, 6), (0.19, 4), (0.21, 3), (0.41, 2), (0.82, 1), (0.91, 0)]
)
def test_it_ends_where_a_token_would_hardly_be_reached_and_accepted(
    least: float, length: int
) -> None:
    """.9, .81, .405, .2025, .10125 ...: products of the largest probabilities."""
    drafter = Grown(TableSource(law), Chain())
    for seed in range(20):
        seq = sequence((0, 1), 9, SeededDice(seed))
        (tree,) = drafter.propose([seq], [Plan(6, 6, min_acceptance=least)], [seq.dice])
        assert len(tree) == length, "whatever tokens were drawn"
        assert (tree.laws == IID).all()
