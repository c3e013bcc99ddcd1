"""Slots follow tokens: prefixes are kept, accepted nodes move into place, prompts are shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity import sequence

from forerun.core.records import Sequence
from forerun.errors import CapacityError
from forerun.runner import kv_cache as cache_module
from forerun.runner.free_memory import UNLIMITED, container_bytes
from forerun.runner.kv_cache import Cache
from forerun.runner.kv_memory import Cells
from forerun.runner.slots import MAX_KEPT_SLOTS, MIN_REUSE_TOKENS, Slot, common_prefix


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
    slot.clear_scratch()
    slot.tokens = list(tokens)
    slot.add([t for t, _ in nodes], [p for _, p in nodes])
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
    with pytest.raises(CapacityError, match="max_seqs is 1, and one more sequence came"):
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


def test_what_comes_next_is_made_ready_in_small_parts() -> None:
    """Fresh memory may come slowly: no step may wait for all of it."""
    c, (slot, other) = cache(), (Slot(0), Slot(1))
    c.reserve(other, 256)
    fill(c, slot, list(range(100)))
    taken, before = [], c.nbytes
    for length in range(101, 600):
        junk = torch.full((2 * before,), torch.nan)  # what is handed out has held anything
        del junk
        held = c._next.nbytes if c._next else 0
        size = c.size
        fill(c, slot, list(range(length)))
        c.prepare(length)
        if c.size == size:
            taken.append((c._next.nbytes if c._next else 0) - held)
        else:
            assert held == c.data.nbytes, "all was ready when it was needed"
        assert cells(c, slot, length) == list(range(length))
        assert not c.data[:, 1].any() and not c.data[:, 0, length:].any()
    assert c.size[2] == 1024 and 0 < max(taken) < c.data.nbytes / 150


def test_a_step_waits_for_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt comes at once; what its cells need next does not."""
    monkeypatch.setattr("forerun.runner.kv_memory.STEP_BYTES", 1000)
    made = Cells((2, 1, 64, 2, 1, 4), torch.float32, torch.device("cpu"))
    for share, expected in ((1.0, 1000), (0.1, 1000), (0.3, 1229), (9.0, 2229)):
        made.ready(share)
        assert made.nbytes == expected
    assert made.whole().shape == made.shape and not made.whole().any()
    assert made.nbytes == 4096


def test_memory_that_is_refused_ahead_of_need_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*words: object) -> None:
        raise MemoryError

    c, slot = cache(), Slot(0)
    fill(c, slot, list(range(200)))
    monkeypatch.setattr("forerun.runner.kv_cache.Cells", refuse)
    c.prepare(250)
    assert c.nbytes == c.data.nbytes and cells(c, slot, 200) == list(range(200))


def test_nothing_is_made_ready_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    c, slot = cache(), Slot(0)
    fill(c, slot, list(range(200)))
    need = 2 * c.data.nbytes
    monkeypatch.setattr("forerun.runner.kv_cache.available_bytes", lambda device: int(3.9 * need))
    c.prepare(250)
    assert c.nbytes == c.data.nbytes
    monkeypatch.setattr("forerun.runner.kv_cache.available_bytes", lambda device: 5 * need)
    c._lacked = ()
    c.prepare(250)
    assert c.nbytes == c.data.nbytes + need
    assert c.check_room(1, 512) == 0, "it counts as held"
    c.reserve(Slot(1), 100)
    assert c.nbytes == c.data.nbytes, "another shape is needed, and it is given back"


def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    c = cache()
    monkeypatch.setattr("forerun.runner.kv_cache.available_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match=r"needs \d+ MiB .* 0 MiB are free"):
        c.reserve(c.sync(sequence([1])), 100)


def test_prompts_one_after_another_need_one_slot() -> None:
    c = cache(max_slots=16)
    for n in range(10):
        seq = sequence([n, n, n])
        fill(c, c.sync(seq), seq.tokens)
        c.release(seq)
    assert len(c.slots) == 1
    assert c.data.shape[1] == 1


def test_a_free_slot_is_better_than_a_copy() -> None:
    c, first, second = cache(), sequence([1, 2, 3]), sequence([1, 2, 4])
    for seq in (first, second):
        fill(c, c.sync(seq), seq.tokens)
    c.release(second)
    assert c.sync(sequence([1, 2, 5])).index == 1, "both hold the same prefix, one is free"


def turn(c: Cache, tokens: list[int]) -> int:
    """A conversation's turn: its tokens so far are computed, then it rests; tokens already held."""
    seq = sequence(tokens)
    slot = c.sync(seq)
    held = len(slot.tokens)
    fill(c, slot, tokens)
    c.release(seq)
    return held


def test_conversations_that_take_turns_keep_their_prefixes() -> None:
    c, system = cache(max_slots=16), [1] * 10
    chats = [system + [n] * 3 * MIN_REUSE_TOKENS for n in (2, 3)]
    for chat in chats:
        turn(c, chat)
    for _ in range(3):
        for chat in chats:
            before = len(chat)
            chat += [7, 8, 9] * MIN_REUSE_TOKENS
            assert turn(c, chat) == before, "all of it was still there"
    assert len(c.slots) == 2
    assert cells(c, c.slots[1], len(chats[1])) == chats[1], "the shared beginning was copied"


def test_few_conversations_are_kept_the_latest_ones() -> None:
    c = cache(max_slots=16)
    chats = [[n] * 2 * MIN_REUSE_TOKENS for n in range(MAX_KEPT_SLOTS + 2)]
    for chat in chats:
        turn(c, chat)
    assert len(c.slots) == MAX_KEPT_SLOTS
    assert turn(c, [*chats[-1], 9]) == turn(c, [*chats[2], 9]) == 2 * MIN_REUSE_TOKENS
    assert turn(c, chats[0]) == 0, "the least recently used ones have gone"


def test_trajectories_of_one_prompt_need_one_slot() -> None:
    c, prompt = cache(max_slots=16), [1] * 3 * MIN_REUSE_TOKENS
    for n in range(5):
        turn(c, prompt)
        turn(c, prompt + [2 + n] * 3 * MIN_REUSE_TOKENS)
    assert len(c.slots) == 1


def test_a_slot_that_holds_little_is_taken_before_a_new_one() -> None:
    c = cache(max_slots=16)
    short, long = sequence([5] * 3), sequence([1] * 2 * MIN_REUSE_TOKENS)
    for seq in (short, long):
        fill(c, c.sync(seq), seq.tokens)
    for seq in (short, long):
        c.release(seq)
    assert c.sync(sequence([6] * MIN_REUSE_TOKENS)).index == 0


def test_conversations_are_kept_only_while_memory_is_ample(monkeypatch: pytest.MonkeyPatch) -> None:
    c = cache(max_slots=16, max_cells=1000)
    size = 2 * 2 * 4 * 4  # bytes of a cell
    monkeypatch.setattr("forerun.runner.kv_cache.available_bytes", lambda device: 7000 * size)
    for n in (2, 3):  # two slots of 1000 cells are more than a quarter of 7000 and what is held
        turn(c, [n] * 2 * MIN_REUSE_TOKENS)
    assert len(c.slots) == 1
    monkeypatch.setattr("forerun.runner.kv_cache.available_bytes", lambda device: 8000 * size)
    turn(c, [4] * 2 * MIN_REUSE_TOKENS)
    assert len(c.slots) == 2


def test_without_room_to_spare_only_what_is_needed_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = cache()
    size = 2 * 2 * 4 * 4  # bytes of a cell
    monkeypatch.setattr("forerun.runner.kv_cache.available_bytes", lambda device: 100 * size)
    c.reserve(c.sync(sequence([1])), 100)
    assert c.data.shape[1:3] == (1, 100)


@pytest.mark.parametrize(("free", "size"), [(1 << 30, (3, 2048)), (1 << 20, (1, 256))])
def test_on_a_gpu_cells_are_taken_at_once_where_memory_is_ample(
    free: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since graphs know them by their addresses; "meta" is a device without memory."""
    monkeypatch.setattr(cache_module, "GRAPH_DEVICE_TYPES", ("meta",))
    monkeypatch.setattr(cache_module, "available_bytes", lambda _: free)
    kind = {"dtype": torch.float32, "device": torch.device("meta")}
    c = Cache(1, 1, 16, max_slots=3, max_cells=4096, **kind)  # type: ignore[arg-type]
    c.reserve(Slot(0), 5)
    assert c.size == (1, *size)


def test_long_lists_are_compared_again_where_they_may_differ() -> None:
    c, seq = cache(), sequence(list(range(200)))
    slot = c.sync(seq)
    fill(c, slot, seq.tokens[:-1])
    c.sync(seq)
    seq.tokens += [7, 8]
    assert len(c.sync(seq).tokens) == 199
    del seq.tokens[150:]
    seq.tokens += [5] * 60  # cut and grown beyond what is held
    assert c.sync(seq).tokens == list(range(150))
    del seq.tokens[20:]
    assert c.sync(seq).tokens == list(range(19))
    fill(c, slot, seq.tokens)
    seq.tokens = [0, 1, 99, *range(3, 200)]  # any change may come as a new list
    assert c.sync(seq).tokens == [0, 1]


def test_an_interrupted_move_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    c, seq = cache(), sequence([1, 2])
    slot = c.sync(seq)
    fill(c, slot, [1, 2], [(4, -1), (5, -1), (6, 1)])
    seq.tokens += [5, 6, 7]

    def interrupt(slot: Slot, source: list[int], start: int) -> None:
        c.data[0, slot.index, start:] = -1
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(c, "move", interrupt)
        with pytest.raises(KeyboardInterrupt):
            c.sync(seq)
    assert c.sync(seq).tokens == [1, 2]
    assert cells(c, slot, 2) == [1, 2]


def write_group(folder: Path, names: tuple[str, str], limit: str, used: int) -> None:
    """The files of a control group with 50 bytes of file cache."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text("anon 7\ninactive_file 20\nactive_file 30\n")


@pytest.mark.parametrize(
    ("line", "base", "names"),
    [
        ("0::/a/b", "", ("memory.max", "memory.current")),
        ("4:memory:/a/b", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_limits_of_a_container_count(
    line: str, base: str, names: tuple[str, str], tmp_path: Path
) -> None:
    own, root = tmp_path / "own", tmp_path / "root"
    own.write_text(f"9:cpu:/x\n{line}\n")
    assert container_bytes(root, own) == UNLIMITED
    write_group(root / base / "a", names, "1000", 600)
    assert container_bytes(root, own) == 1000 - 600 + 50, "the group above ours limits us too"
    write_group(root / base / "a/b", names, "500", 300)
    assert container_bytes(root, own) == 500 - 300 + 50
    write_group(root / base / "a/b", names, "max", 300)
    assert container_bytes(root, own) == 450
    assert container_bytes(root, tmp_path / "nothing") == UNLIMITED


def test_cells_that_grew_within_a_pass_are_copied_outside_of_one() -> None:
    """Searches take up stems between passes, where torch does not run in inference mode."""
    c, first, second = cache(), Slot(0), Slot(1)
    with torch.inference_mode():
        c.reserve(first, 300)
        c.reserve(second, 600)
        c.data[:, 0, :4] = 1.0
    c.copy(second, first, 4)
    assert bool((c.data[:, 1, :4] == 1.0).all())
