"""Sequences that nobody finished: whoever drives a drafter may drop one without a word."""

from __future__ import annotations

import gc

import pytest

from fakes import sequence as made
from forerun import registry
from forerun.dice import SeededDice
from forerun.drafters.stand import Stand
from forerun.errors import ConfigError
from forerun.records import Plan, Sequence


def sequence(tokens: list[int]) -> Sequence:
    seq = made(tokens, 99, SeededDice(0))
    seq.group = 0
    return seq


def test_a_sequence_that_was_given_up_uses_no_memory() -> None:
    """Neither is its memory held against the budget, nor may it stop a run that is to be saved."""
    drafter, seq = Stand(), sequence([1, 2])
    drafter.start(seq)
    with pytest.raises(ConfigError, match="scope group ends with its group"):
        drafter.keep()
    del seq
    gc.collect()
    drafter.keep()


@pytest.mark.parametrize("name", ["suffix", "sam"])
def test_texts_of_a_sequence_that_was_given_up_may_be_replaced(name: str) -> None:
    drafter, seq = registry.make("drafter", f"{name}:scope=tenant"), sequence([1, 2, 3])
    drafter.propose([seq], [Plan(nodes=2)])
    other = drafter.snapshot()
    with pytest.raises(ConfigError, match="expected no running request"):
        drafter.restore(other)
    del seq
    gc.collect()
    drafter.restore(other)
