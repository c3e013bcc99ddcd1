"""Settings of the Monte-Carlo search for a draft tree, in the form that kernels take."""

from __future__ import annotations

from typing import NamedTuple

REWARDS = ("constant", "path", "expected")
CONSTANT, PATH, EXPECTED = range(3)  # indices into REWARDS


class SearchSettings(NamedTuple):
    """Settings of one search, documented in grower `monte_carlo`."""

    steps: int  # max path length
    iterations: int
    top: int  # number of paths kept
    c1: float
    c2: float
    reward: int  # index into REWARDS
    visits_all: bool
    drops_longest: bool
