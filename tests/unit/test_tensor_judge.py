"""Verdicts of a batch on a device: what is learned from them, and what an error leaves behind."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch

from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Rows, Sequence
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import EMPTY, Tree
from forerun.errors import ForerunError
from forerun.verifiers import _gpu_verdicts as tensor_judge

VOCAB, TOP = 50, 6


def laws_of(logits: torch.Tensor, sampling: Sampling, tree: Tree = EMPTY) -> TargetProbs:
    seq = Sequence([1, 2], 2, sampling, SeededDice(0), 9)
    laws = TargetProbs(Rows(logits), seq, tree, ())
    laws.num_top_logits = TOP
    return laws


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-8, 1e-3, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("is_raw", [True, False])
def test_the_largest_entries_are_those_of_the_distribution(
    temperature: float, is_raw: bool
) -> None:
    logits = 40 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    laws = laws_of(logits, Sampling(temperature=temperature))
    tensor_judge.verdicts([EMPTY], [laws], [SeededDice(0)])
    assert laws.top_entries is not None
    ids, probs = laws.top_entries.entries([-1], TOP, is_raw=is_raw)
    used = 1.0 if is_raw or temperature == 0 else temperature
    whole = to_probs(logits[0].numpy(), Sampling(temperature=used))
    assert np.isfinite(probs).all() and probs.sum() <= 1 + 1e-6
    np.testing.assert_allclose(probs[0], whole[ids[0]], atol=2e-6)
    assert probs[0, 0] == pytest.approx(whole.max(), abs=2e-6)


@pytest.mark.parametrize("bad", [Sampling(temperature=0.8), Sampling(temperature=0.0)])
def test_an_error_leaves_the_dice_of_all_as_they_were(bad: Sampling) -> None:
    good = laws_of(torch.randn(1, VOCAB), Sampling(temperature=0.8))
    broken = laws_of(torch.full((1, VOCAB), torch.nan), bad)
    dice = [SeededDice(1), SeededDice(2)]
    before = deepcopy(dice)
    with pytest.raises(ForerunError):
        tensor_judge.verdicts([EMPTY, EMPTY], [good, broken], dice)
    for one, other in zip(dice, before, strict=True):
        assert one.coin(0.5) == other.coin(0.5)
        assert one.choice(np.full(9, 1 / 9)) == other.choice(np.full(9, 1 / 9))
