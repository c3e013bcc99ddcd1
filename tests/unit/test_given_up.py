"""Sequences that nobody finished: whoever drives a drafter may drop one without a word."""

from __future__ import annotations

import gc

import pytest

from fakes import sequence as made
from forerun import registry
from forerun.dice import SeededDice
from forerun.errors import ConfigError
from forerun.ngrams.sharing import Memories
from forerun.records import Plan, Sequence


def sequence(tokens: list[int]) -> Sequence:
    seq = made(tokens, 99, SeededDice(0))
    seq.group = 0
    return seq


def test_a_sequence_that_was_given_up_uses_no_memory() -> None:
    """Its memory is not held against the budget."""
    memories, seq = Memories(context=2, entries=4, budget=1 << 20), sequence([1, 2])
    memories.join("a", seq)
    assert memories.users() == {seq}
    del seq
    gc.collect()
    assert not memories.users()


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
