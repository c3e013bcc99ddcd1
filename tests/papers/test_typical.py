"""Typical acceptance (Medusa, arXiv 2401.10774): more kept drafts, and what they cost.

The synthetic pair, chains of 4, T = 1: the paper has it keep more than rejection sampling at
temperatures above 0, and equal greedy decoding at 0.
"""

from __future__ import annotations

import pytest
from noisy_pair import Pair, run

pytestmark = pytest.mark.paper


def test_more_drafts_are_kept_than_the_law_allows() -> None:
    pair = Pair(5, noise=0.8)
    taus = {
        (rule, t): run(pair, "chain", rule, nodes=4, depth=4, temperature=t, length=1500).tau
        for rule in ("speculative", "typical")
        for t in (0.0, 1.0)
    }
    print(taus)
    assert taus["typical", 1.0] > 1.1 * taus["speculative", 1.0]
    assert taus["typical", 0.0] == taus["speculative", 0.0]
