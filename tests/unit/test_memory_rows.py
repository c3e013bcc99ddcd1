"""Merging memories against a dictionary that has seen both texts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.acceptance_prior import HALF_LIFE_TRIALS, SNAPSHOT_BYTES, AcceptanceCounts
from forerun.core.records import Snapshot
from forerun.errors import ConfigError, DataError
from forerun.ngrams.tables.logits import kernels, serialize
from forerun.ngrams.tables.logits.serialize import (
    CHANCES,
    OLD_CHANCES_SHAPE,
    blend,
    check,
    from_snapshot,
    merge,
    newest,
    to_snapshot,
)
from forerun.ngrams.tables.logits.table import LogitMemory

BOB, MARY, TOM, SUE = range(4)
Update = tuple[list[int], list[int], list[float]]


def filled(updates: list[Update], entries: int = 10, context: int = 3) -> LogitMemory:
    memory = LogitMemory(context=context, entries=entries)
    for update in updates:
        memory.update(*update)
    return memory


def random_updates(seed: int, count: int, vocab: int) -> list[Update]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        size = int(rng.integers(1, vocab + 1))
        probs = rng.dirichlet(np.ones(size)) * rng.uniform(0.5, 1)
        context = rng.integers(0, vocab, rng.integers(1, 5)).tolist()
        found.append((context, rng.permutation(vocab)[:size].tolist(), probs.tolist()))
    return found


def as_dict(rows: kernels.Table) -> dict[int, tuple[int, dict[int, float]]]:
    """Key -> count and means by id."""
    return {
        int(key): (int(count), {int(i): float(p) for i, p in zip(ids, probs, strict=True) if p > 0})
        for key, count, _, ids, probs in zip(*rows, strict=True)
    }


def assert_same(one: kernels.Table, other: kernels.Table) -> None:
    ours, theirs = as_dict(one), as_dict(other)
    assert ours.keys() == theirs.keys()
    for key, (count, means) in ours.items():
        assert count == theirs[key][0]
        assert means == pytest.approx(theirs[key][1], abs=1e-5)


def test_worked_example_by_counts() -> None:
    """Two observations of .5 and .4 against one of .8: the mean of three."""
    one = filled([([1], [BOB, MARY], [0.4, 0.3]), ([1], [BOB, TOM], [0.6, 0.2])], context=1)
    two = filled([([1], [BOB, SUE], [0.8, 0.1])], context=1)
    ((count, means),) = as_dict(blend([one.rows(), two.rows()])).values()
    assert count == 3
    assert means == pytest.approx({BOB: 0.6, MARY: 0.1, TOM: 0.2 / 3, SUE: 0.1 / 3}, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(2, 8))
def test_merged_is_as_if_one_memory_had_seen_all(seed: int, parts: int, vocab: int) -> None:
    """Exact while no id is cut off: as many entries as tokens."""
    texts = [random_updates(seed + i, 30, vocab) for i in range(parts)]
    rows = blend([filled(text).rows() for text in texts])
    assert_same(rows, filled([update for text in texts for update in text]).rows())
    assert check(rows, 10) is rows


def test_order_does_not_matter_and_the_largest_stay() -> None:
    parts = [filled(random_updates(i, 60, 12), entries=4).rows() for i in range(3)]
    assert_same(blend(parts), blend(parts[::-1]))
    for row in blend(parts).probs:
        assert np.all(np.diff(row) <= 0)


def test_ties_go_to_the_lower_id_and_padding_is_no_token() -> None:
    one = filled([([1], [5, 3], [0.25, 0.25])], entries=3, context=1)
    two = filled([([1], [0, 7], [0.25, 0.25])], entries=3, context=1)
    rows = blend([one.rows(), two.rows()])
    assert rows.ids[0].tolist() == [0, 3, 5]
    assert rows.probs[0].tolist() == [0.125] * 3


def test_a_copy_changes_counts_only() -> None:
    rows = filled(random_updates(3, 80, 9), entries=4).rows()
    twice = blend([rows, rows])
    np.testing.assert_array_equal(twice.counts, 2 * rows.counts)
    np.testing.assert_array_equal(twice.probs, rows.probs)
    np.testing.assert_array_equal(twice.ids[rows.probs > 0], rows.ids[rows.probs > 0])


def test_counts_do_not_overflow() -> None:
    rows = filled([([1], [2], [0.5])], context=1).rows()
    for _ in range(40):
        rows = blend([rows, rows])
    assert rows.counts.tolist() == [serialize.MAX_COUNT]
    memory = LogitMemory(context=1)
    memory.load_rows(rows)
    memory.update([1], [2], [0.5])
    assert memory.table.probs.max() == pytest.approx(0.5)


def test_hold_brings_back_every_answer() -> None:
    rng = np.random.default_rng(0)
    memory = filled(random_updates(1, 3000, 40))
    copy = LogitMemory(context=3)
    copy.update([7, 7, 7], [1], [1.0])  # forgotten
    copy.load_rows(memory.rows(), memory.observed)
    assert (len(copy), copy.observed, copy.evicted) == (len(memory), memory.observed, 0)
    for _ in range(500):
        tokens = rng.integers(0, 42, 3).tolist()
        ours, theirs = copy.lookup(tokens), memory.lookup(tokens)
        assert (ours is None) == (theirs is None)
        if ours and theirs:
            np.testing.assert_array_equal(ours.ids, theirs.ids)
            np.testing.assert_array_equal(ours.probs, theirs.probs)


def test_what_was_hit_last_survives_a_small_budget() -> None:
    memory = LogitMemory(context=1, entries=1)
    for token in range(400):
        memory.update([token], [0], [1.0])
    memory.update([0], [0], [1.0])
    for token in range(0, 400, 4):
        memory.lookup([token])
    small = LogitMemory(context=1, entries=1, budget=200 * 24)
    small.load_rows(memory.rows())
    assert small.nbytes <= 200 * 24 and len(small) == 120 and small.evicted == 280
    assert all(small.lookup([token]) for token in range(0, 400, 4))
    small.update([1000], [0], [1.0])  # full: a quarter goes, and the clock has gone on
    left = [token for token in range(400) if small.lookup([token])]
    assert small.lookup([1000]) and len(left) == 90 and all(token % 4 == 0 for token in left)


def test_recency_counts_back_from_each_memory() -> None:
    """A long history does not make a memory's old contexts look recent beside a short one."""
    old, new = LogitMemory(context=1, entries=1), LogitMemory(context=1, entries=1)
    for token in range(50):
        old.update([token], [0], [1.0])
    for token in range(100, 103):
        new.update([token], [0], [1.0])
    kept = newest(blend([old.rows(), new.rows()]), 6)
    memory = LogitMemory(context=1, entries=1)
    memory.load_rows(kept)
    assert [t for t in range(103) if memory.lookup([t])] == [47, 48, 49, 100, 101, 102]
    assert sorted(kept.stamps.tolist()) == [1, 1, 2, 2, 3, 3]


def test_same_contents_same_bytes() -> None:
    one, two = random_updates(1, 50, 9), random_updates(2, 50, 9)
    rows = filled(one + two).rows()
    copy = LogitMemory(context=3, entries=10)
    copy.load_rows(rows)
    for ours, theirs in zip(copy.rows(), rows, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_merged_snapshots_cap_and_count() -> None:
    settings = {"context": [1], "entries": 1, "store": "model"}
    rows = filled([([t], [0], [1.0]) for t in range(10)], entries=1, context=1).rows()
    chances = {drawn: AcceptanceCounts(drawn=drawn) for drawn in (True, False)}
    one = to_snapshot("stand", rows, settings, {"tokens": 10, "evicted": 1}, chances)
    whole = merge([one, one])
    assert whole.counts == {"tokens": 20, "evicted": 2, "contexts": 10}
    most = SNAPSHOT_BYTES + 4 * 24 + 23
    capped = merge([one, one], max_bytes=most)
    assert capped.counts == {"tokens": 20, "evicted": 8, "contexts": 4}
    assert capped.nbytes <= most
    other = to_snapshot("stand", rows, settings | {"store": "processed"}, one.counts, chances)
    with pytest.raises(ConfigError, match="store=model, got one with store=processed"):
        merge([one, other])


def counted(seed: int, *, drawn: bool = True, trials: int = 300) -> AcceptanceCounts:
    """Chances that have seen single nodes of random cells, some of them accepted."""
    chances, rng = AcceptanceCounts(drawn=drawn), np.random.default_rng(seed)
    parents = np.array([-1], np.int32)
    for _ in range(trials):
        cell = rng.integers(0, chances.tries.size, 1).astype(np.int8)
        chances.learn(parents, cell, [0] if rng.random() < 0.4 else [])
    return chances


@pytest.mark.parametrize("drawn", [True, False])
def test_chances_add_up_as_if_one_had_counted_all(drawn: bool) -> None:
    parts = [counted(seed, drawn=drawn) for seed in range(3)]
    belief, whole = AcceptanceCounts(drawn=drawn), AcceptanceCounts.sum(parts, drawn=drawn)
    for name in ("tries", "hits"):
        first = getattr(belief, name)
        expected = first + sum(getattr(part, name) - first for part in parts)
        np.testing.assert_allclose(getattr(whole, name), expected)
    assert whole.tries.sum() == pytest.approx(belief.tries.sum() + 900)


def test_summed_chances_never_outgrow_their_bound() -> None:
    part = AcceptanceCounts()
    part.tries[:], part.hits[:] = HALF_LIFE_TRIALS - 1, 0.25 * (HALF_LIFE_TRIALS - 1)
    whole = AcceptanceCounts.sum([part] * 5)
    assert whole.tries.max() <= HALF_LIFE_TRIALS
    np.testing.assert_allclose(whole.rates, part.rates, atol=0.01)


def snapshot_with(chances: dict[bool, AcceptanceCounts]) -> Snapshot:
    rows = filled([([1], [0], [1.0])], entries=1, context=1).rows()
    settings = {"context": [1], "entries": 1, "store": "model"}
    return to_snapshot("stand", rows, settings, {"tokens": 1, "evicted": 0}, chances)


def test_chances_are_kept_and_a_file_without_them_begins_with_what_is_believed() -> None:
    chances = {drawn: counted(int(drawn), drawn=drawn) for drawn in (True, False)}
    held = snapshot_with(chances)
    _, found = from_snapshot(held)
    for drawn in (True, False):
        np.testing.assert_allclose(found[drawn].rates, chances[drawn].rates, rtol=1e-6)
    old = replace(held, arrays={k: a for k, a in held.arrays.items() if k not in CHANCES})
    _, found = from_snapshot(old)
    for drawn in (True, False):
        np.testing.assert_array_equal(found[drawn].rates, AcceptanceCounts(drawn=drawn).rates)
    _, mixed = from_snapshot(merge([held, old]))  # the old one counts as no trial
    np.testing.assert_allclose(mixed[True].rates, chances[True].rates, rtol=1e-5)


def test_counts_of_all_levels_together_are_no_belief_about_any() -> None:
    """Files of before levels were told apart keep their contexts and begin with the beliefs."""
    held = snapshot_with({drawn: counted(3, drawn=drawn) for drawn in (True, False)})
    common = {
        name: np.full(OLD_CHANCES_SHAPE, count, np.float32)
        for name, count in zip(CHANCES, (9, 1), strict=True)
    }
    rows, found = from_snapshot(replace(held, arrays=held.arrays | common))
    assert len(rows.keys) == 1
    for drawn in (True, False):
        np.testing.assert_array_equal(found[drawn].rates, AcceptanceCounts(drawn=drawn).rates)
    with pytest.raises(DataError, match="use another memory file"):  # one of each kind
        from_snapshot(replace(held, arrays=held.arrays | {"hits": common["hits"]}))


@pytest.mark.parametrize(
    "spoiled",
    [
        {"tries": lambda a: a[:, 1:]},
        {"tries": lambda a: a * 0},
        {"tries": lambda a: a * np.nan},
        {"hits": lambda a: a + HALF_LIFE_TRIALS},
        {"hits": lambda a: -a},
        {"hits": lambda a: a.astype(np.float64)},
        {"hits": None},
    ],
)
def test_chances_that_are_none_are_refused(spoiled: dict) -> None:
    held = snapshot_with({drawn: AcceptanceCounts(drawn=drawn) for drawn in (True, False)})
    arrays = dict(held.arrays)
    for name, change in spoiled.items():
        array = arrays.pop(name)
        if change is not None:
            arrays[name] = change(array)
    with pytest.raises(DataError, match="use another memory file"):
        from_snapshot(replace(held, arrays=arrays))


def spoil(rows: kernels.Table, name: str, change: object) -> kernels.Table:
    array = getattr(rows, name).copy()
    return rows._replace(**{name: change(array)})  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("keys", lambda a: a[::-1]),
        ("keys", lambda a: np.zeros_like(a)),
        ("keys", lambda a: a.astype(np.int64)),
        ("counts", lambda a: a * 0),
        ("counts", lambda a: a[1:]),
        ("ids", lambda a: a - 1),
        ("ids", lambda a: a[:, 1:]),
        ("probs", lambda a: a * np.nan),
        ("probs", lambda a: a * 9),
        ("probs", lambda a: a[:, ::-1]),
        ("probs", lambda a: a * 0),
    ],
)
def test_what_is_no_memory_is_refused(name: str, change: object) -> None:
    rows = filled([([t], [0, 1], [0.6, 0.3]) for t in range(5)], entries=2).rows()
    check(rows, 2)
    with pytest.raises(DataError, match="use another memory file"):
        check(spoil(rows, name, change), 2)


def test_missing_arrays_are_named() -> None:
    from forerun.core.records import Snapshot

    snapshot = Snapshot("stand", {"keys": np.zeros(0, np.uint64)}, {"entries": 1}, {"tokens": 0})
    with pytest.raises(DataError, match="expected the arrays keys, counts, .* got keys"):
        serialize.from_snapshot(snapshot)
