"""Slots follow tokens: prefixes are kept, accepted nodes move into place, prompts are shared."""

from __future__ import annotations

import pytest
import torch
from parity import sequence

from forerun.engine.cache import Cache, Slot, common_prefix
from forerun.errors import CapacityError
from forerun.records import Sequence


def cache(max_slots: int = 4, max_cells: int = 4096) -> Cache:
    return Cache(
        2,
        1,
        4,
        max_slots=max_slots,
        max_cells=max_cells,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def fill(c: Cache, slot: Slot, tokens: list[int], nodes: list[tuple[int, int]] = ()) -> None:  # type: ignore[assignment]
    """Pretends that a pass computed `tokens` and scratch nodes (token, parent): cell = token."""
    c.reserve(slot, len(tokens) + len(nodes))
    slot.tokens, slot.base = list(tokens), len(tokens)
    slot.nodes, slot.parents = [t for t, _ in nodes], [p for _, p in nodes]
    for cell, token in enumerate([*tokens, *slot.nodes]):
        c.data[:, slot.index, cell] = token


def cells(c: Cache, slot: Slot, count: int) -> list[int]:
    """The tokens that the first cells were written for; the same in all layers."""
    part = c.data[:, slot.index, :count]
    assert (part == part[:1, :, :1, :1, :1]).all()
    return part[0, :, 0, 0, 0].int().tolist()


def test_common_prefix() -> None:
    a = list(range(50))
    for n in range(50):
        assert common_prefix(a, [*a[:n], -1, *a[n:]]) == n
    assert common_prefix(a, a) == 50
    assert common_prefix([], a) == 0
    assert common_prefix(a, a[:7]) == 7


def test_an_accepted_branch_moves_into_place() -> None:
    c, seq = cache(), sequence([1, 2, 3])
    slot = c.sync(seq)
    fill(c, slot, [1, 2, 3], [(4, -1), (5, -1), (6, 1), (7, 1), (8, 3)])
    seq.tokens += [5, 7, 8, 9]
    assert c.sync(seq) is slot
    assert slot.tokens == [1, 2, 3, 5, 7, 8]
    assert cells(c, slot, 6) == slot.tokens
    assert slot.nodes == []


def test_the_last_token_always_stays_pending() -> None:
    c, seq = cache(), sequence([1, 2])
    slot = c.sync(seq)
    fill(c, slot, [1, 2], [(4, -1), (5, 0)])
    seq.tokens += [4, 5]
    c.sync(seq)
    assert slot.tokens == [1, 2, 4]


def test_taken_back_and_changed_tokens_are_dropped() -> None:
    c, seq = cache(), sequence([1, 2, 3, 4])
    slot = c.sync(seq)
    fill(c, slot, [1, 2, 3, 4], [(5, -1)])
    seq.tokens = [1, 2, 9, 4, 5]
    c.sync(seq)
    assert slot.tokens == [1, 2]
    seq.tokens = [1]
    c.sync(seq)
    assert slot.tokens == [], "the row of the last token is wanted again"


def test_a_new_sequence_takes_over_the_longest_prefix() -> None:
    c, first, second = cache(), sequence([1, 2, 3, 4]), sequence([1, 2, 3, 9])
    slot = c.sync(first)
    fill(c, slot, [1, 2, 3, 4])
    copy = c.sync(second)
    assert copy is not slot
    assert copy.tokens == [1, 2, 3]
    assert cells(c, copy, 3) == [1, 2, 3]
    assert slot.tokens == [1, 2, 3, 4], "a running sequence keeps its own"


def test_a_free_slot_keeps_its_tokens_until_it_is_reused() -> None:
    c, first = cache(), sequence([1, 2, 3, 4])
    slot = c.sync(first)
    fill(c, slot, [1, 2, 3, 4])
    c.release(first)
    third = sequence([1, 2, 3, 7])
    assert c.sync(third) is slot, "no copy is needed where the holder has left"
    assert slot.tokens == [1, 2, 3]
    assert len(c.slots) == 1


def test_a_forgotten_sequence_frees_its_slot() -> None:
    c, first = cache(max_slots=1), sequence([1, 2])
    c.sync(first)
    second = sequence([5])
    with pytest.raises(CapacityError, match="more than 1 sequences"):
        c.sync(second)
    del first
    assert c.sync(second).index == 0


def test_the_oldest_free_slot_is_reused() -> None:
    c = cache(max_slots=2)
    seqs: list[Sequence] = [sequence([n, n]) for n in (1, 2)]
    for seq in seqs:
        fill(c, c.sync(seq), seq.tokens)
    for seq in seqs:
        c.release(seq)
    assert c.sync(sequence([3, 3])).index == 0


def test_cells_grow_and_keep_their_content() -> None:
    c, seq = cache(), sequence([1])
    slot = c.sync(seq)
    fill(c, slot, list(range(200)))
    assert c.data.shape[2] == 256, "short runs do not pay for long contexts"
    fill(c, slot, list(range(300)))
    assert c.data.shape[2] == 512
    other = c.sync(sequence([7]))
    c.reserve(other, 10)
    assert cells(c, slot, 300) == list(range(300))


def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    c = cache()
    monkeypatch.setattr("forerun.engine.cache.available_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match=r"needs \d+ MiB .* 0 MiB are free"):
        c.reserve(c.sync(sequence([1])), 100)
