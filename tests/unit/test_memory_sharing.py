"""Memories under one budget: what must go, goes with all that leans on it."""

from __future__ import annotations

from fakes import sequence
from forerun.core.dice import SeededDice
from forerun.core.scopes import keys_of
from forerun.ngrams.tables.logits.pool import Memories


def test_an_idle_wide_memory_goes_with_those_before_it() -> None:
    memories = Memories(context=2, entries=4, budget=1 << 22)
    seqs = [sequence((0, 1), 9, SeededDice(0)) for _ in range(2)]
    for seq, tenant in zip(seqs, ("a", "b"), strict=True):
        seq.tenant, seq.group = tenant, tenant
        wide, near = (memories[key] for key in keys_of("tenant", seq))
        near.set_fallback(wide)
    first, second = (keys_of("tenant", seq) for seq in seqs)
    for key in second:
        memories.add_user(key, seqs[1])
    memories.add_user(first[1], seqs[0])  # its own alone: the wide one may go
    memories.make_room(memories.budget - memories.nbytes + 1)
    assert set(memories._memories) == set(second)
    assert memories[second[1]].fallback is memories[second[0]]
