"""The settings of a Monte-Carlo search for a draft tree, as numbers that kernels take."""

from __future__ import annotations

from typing import NamedTuple

REWARDS = ("constant", "path", "expected")
CONSTANT, PATH, EXPECTED = range(3)  # indexes into REWARDS


class Search(NamedTuple):
    """Settings of one search; grower `monte_carlo` makes and documents them."""

    steps: int  # longest path that is searched
    iterations: int
    top: int  # paths that are kept
    c1: float
    c2: float
    reward: int  # index into REWARDS
    visits_all: bool
    drops_longest: bool
