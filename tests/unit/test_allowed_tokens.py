"""Proposals are restricted to allowed tokens, by tests or by one mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fakes import sequence
from forerun.core.allowed import AllowedTokens
from forerun.core.dice import SeededDice
from forerun.core.roles import Shaper
from forerun.core.tree import Proposal

VOCAB = 1000


class Even(Shaper):
    """Allows even tokens; counts tests and masks."""

    forbids = True

    def __init__(self, has_mask: bool) -> None:
        self.has_mask, self.tests_made, self.masks_made = has_mask, 0, 0

    def logits(self, state: Any, logits: np.ndarray) -> np.ndarray:
        return np.where(np.arange(VOCAB) % 2 == 0, logits, -np.inf)

    def allows(self, state: Any, token: int) -> bool:
        self.tests_made += 1
        return token % 2 == 0

    def mask(self, state: Any) -> np.ndarray | None:
        self.masks_made += self.has_mask
        return np.arange(VOCAB) % 2 == 0 if self.has_mask else None


def restricted(shaper: Even, size: int) -> Proposal:
    seq = sequence((1,), 4, SeededDice(0))
    seq.shapers, seq.states = (shaper,), (0,)
    allowed = AllowedTokens.of(seq)
    assert allowed is not None
    found = allowed.restrict((), Proposal(np.arange(size, dtype=np.int32), np.full(size, 1 / size)))
    assert found is not None and found.probs.sum() == pytest.approx(1)
    return found


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("size", [4, 200])
def test_forbidden_tokens_are_left_out(has_mask: bool, size: int) -> None:
    shaper = Even(has_mask)
    assert restricted(shaper, size).ids.tolist() == list(range(0, size, 2))


def test_many_tokens_need_one_mask_and_no_test() -> None:
    shaper = Even(has_mask=True)
    assert len(restricted(shaper, VOCAB).ids) == VOCAB // 2
    assert (shaper.tests_made, shaper.masks_made) == (0, 1)
    restricted(shaper, 4)
    assert (shaper.tests_made, shaper.masks_made) == (4, 1)


def test_many_tokens_without_a_mask_are_not_tested() -> None:
    shaper = Even(has_mask=False)
    assert len(restricted(shaper, VOCAB).ids) == VOCAB
    assert shaper.tests_made == 0
