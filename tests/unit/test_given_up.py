"""Sequences that nobody finished: whoever drives a drafter may drop one without a word."""

from __future__ import annotations

import gc

import pytest

from fakes import sequence as made
from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence
from forerun.ngrams.tables.logits.pool import Memories

pytestmark = pytest.mark.usefixtures("short_collections")


def sequence(tokens: list[int]) -> Sequence:
    seq = made(tokens, 99, SeededDice(0))
    seq.group = 0
    return seq


def test_a_sequence_that_was_given_up_uses_no_memory() -> None:
    """Its memory is not held against the budget."""
    memories, seq = Memories(context=2, entries=4, budget=1 << 20), sequence([1, 2])
    memories.add_user("a", seq)
    assert memories.users() == {seq}
    del seq
    gc.collect()
    assert not memories.users()


@pytest.mark.parametrize("name", ["suffix", "sam"])
def test_texts_of_a_sequence_that_was_given_up_may_be_replaced(name: str) -> None:
    drafter, seq = registry.make("drafter", f"{name}:scope=tenant"), sequence([1, 2, 3])
    drafter.propose([seq], [Plan(nodes=2)], [seq.dice])
    other = drafter.snapshot()
    del seq
    gc.collect()
    drafter.restore(other)
    assert drafter.snapshot().counts == other.counts


@pytest.mark.parametrize("name", ["suffix:scope=tenant", "sam:scope=tenant,bias=0"])
def test_a_running_sequence_goes_on_whole_where_texts_are_replaced(name: str) -> None:
    """As a memory begins while it runs: it drafts from what was loaded; what it says is kept."""
    drafter, other = (registry.make("drafter", name) for _ in range(2))
    before, seq = sequence([1, 2, 3, 4, 5, 6, 7, 8]), sequence([9, 1, 2])
    other.propose([before], [Plan(nodes=2)], [before.dice])
    other.finish(before)
    drafter.start(seq)
    assert not len(drafter.propose([seq], [Plan(nodes=2)], [seq.dice])[0])
    drafter.restore(other.snapshot())
    seq.tokens += [3, 4]
    assert drafter.propose([seq], [Plan(nodes=2, depth=2)], [seq.dice])[0].tokens.tolist() == [5, 6]
    drafter.finish(seq)
    counts = drafter.snapshot().counts
    assert counts == {"tokens": 8 + 5, "texts": 2}
