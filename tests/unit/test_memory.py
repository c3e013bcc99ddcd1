"""The logit memory against a dictionary that does what the paper says."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from forerun.core.records import Plan
from forerun.core.tree import EMPTY, chain
from forerun.core.tree_template import grid
from forerun.errors import ConfigError
from forerun.ngrams.tables.logits import draft_template, kernels
from forerun.ngrams.tables.logits import table as memory
from forerun.ngrams.tables.logits.kernels import NOTHING, Temper
from forerun.ngrams.tables.logits.table import LogitMemory, context_lengths, warm_up
from forerun.ngrams.tables.logits.top_k import select_above, select_top
from forerun.ngrams.tables.logits.top_probs import largest

BOB, MARY, TOM, SUE = range(4)


class Dictionary:
    """Running means by context, in float64 and by definition."""

    def __init__(self, lengths: tuple[int, ...], entries: int) -> None:
        self.lengths, self.entries = lengths, entries
        self.known: dict[tuple[int, ...], tuple[int, dict[int, float]]] = {}

    def update(self, tokens: list[int], ids: list[int], probs: list[float]) -> None:
        new = self.best(dict(zip(ids, probs, strict=True)))
        for n in self.lengths:
            if n <= len(tokens):
                key = tuple(tokens[-n:])
                count, old = self.known.get(key, (0, {}))
                mean = {t: (count * old.get(t, 0) + new.get(t, 0)) / (count + 1) for t in old | new}
                self.known[key] = count + 1, self.best(mean)

    def best(self, probs: dict[int, float]) -> dict[int, float]:
        order = sorted(probs, key=lambda t: (-probs[t], t))
        return {t: probs[t] for t in order[: self.entries] if probs[t] > 0}

    def lookup(self, tokens: list[int]) -> dict[int, float] | None:
        for n in self.lengths:
            if n <= len(tokens) and tuple(tokens[-n:]) in self.known:
                probs = self.known[tuple(tokens[-n:])][1]
                return {t: p / sum(probs.values()) for t, p in probs.items()}
        return None


def as_dict(memory: LogitMemory, tokens: list[int]) -> dict[int, float] | None:
    q = memory.lookup(tokens)
    return None if q is None else dict(zip(q.ids.tolist(), q.probs.tolist(), strict=True))


class Levels:
    """Two dictionaries, asked in turn at every length."""

    def __init__(self, near: Dictionary, far: Dictionary) -> None:
        self.near, self.far = near, far

    def lookup(self, tokens: list[int]) -> dict[int, float] | None:
        for n in self.near.lengths:
            for level in (self.near, self.far):
                if n <= len(tokens) and tuple(tokens[-n:]) in level.known:
                    return level.lookup(tokens[-n:])
        return None


def random_update(
    rng: np.random.Generator, vocab: int, longest: int = 6
) -> tuple[list[int], list[int], list[float]]:
    """A short context, and a truncated law after it."""
    tokens = rng.integers(0, vocab, rng.integers(1, longest)).tolist()
    size = int(rng.integers(1, vocab))
    probs = rng.dirichlet(np.ones(size)) * rng.uniform(0.5, 1)
    return tokens, rng.permutation(vocab)[:size].tolist(), probs.tolist()


def assert_consistent(memory: LogitMemory) -> None:
    """Every key is found where linear probing looks for it, and the size is right."""
    held = np.flatnonzero(memory.table.keys)
    assert len(memory) == len(held)
    for slot in held:
        assert kernels.find(memory.table.keys, memory.table.keys[slot]) == slot


def test_a_slot_lies_in_one_piece_and_kernels_know_one_type_of_table() -> None:
    table = kernels.new_table(100, 10)
    for column in table[1:]:
        assert column.strides[0] == 4 * (1 + 1 + 10 + 10)
    first = [column.__array_interface__["data"][0] for column in table[1:]]
    assert np.diff(first).tolist() == [4, 4, 40]  # count, stamp, ids, probabilities
    for other in (NOTHING, kernels.new_table(1, 1), kernels.new_table(2, 64)):
        assert [numba.typeof(a) for a in other] == [numba.typeof(a) for a in table]
        assert len(other.keys) >= 2


def test_what_is_saved_has_no_gaps() -> None:
    memory = LogitMemory(entries=3)
    memory.update([1, 2], [3, 4], [0.5, 0.25])
    assert all(array.flags.c_contiguous for array in memory.rows())


def test_worked_example_of_the_paper() -> None:
    memory = LogitMemory()
    memory.update([10, 11], [BOB, MARY, TOM], [0.7, 0.2, 0.05])
    memory.update([10, 11], [BOB, MARY, SUE], [0.3, 0.6, 0.05])
    place, _ = kernels.find_longest(
        memory.table.keys,
        NOTHING.keys,
        memory.lengths,
        memory.context([10, 11]),
        np.empty(4, np.uint64),
    )
    slot = place - 1
    assert memory.table.counts[slot] == 2
    assert memory.table.ids[slot, :4].tolist() == [BOB, MARY, TOM, SUE]
    np.testing.assert_allclose(memory.table.probs[slot, :5], [0.5, 0.4, 0.025, 0.025, 0], atol=1e-7)
    q = as_dict(memory, [10, 11])
    assert q is not None and q[BOB] == pytest.approx(0.5 / 0.95)


@pytest.mark.parametrize("entries", [1, 3, 10])
@pytest.mark.parametrize("context", [4, (4, 2), (3,), 1])
def test_equals_the_dictionary(entries: int, context: int | tuple[int, ...]) -> None:
    rng = np.random.default_rng(entries)
    memory = LogitMemory(context=context, entries=entries)
    plain = Dictionary(context_lengths(context), entries)
    for _ in range(800):
        update = random_update(rng, 6)
        memory.update(*update)
        plain.update(*update)
    assert len(memory) == len(plain.known)
    for _ in range(300):
        tokens = rng.integers(0, 7, rng.integers(1, 7)).tolist()
        ours, theirs = as_dict(memory, tokens), plain.lookup(tokens)
        if theirs is None:
            assert ours is None
        else:
            assert ours == pytest.approx(theirs, abs=1e-5)


def test_two_levels_are_asked_in_turn_at_every_length() -> None:
    rng = np.random.default_rng(4)
    near, far = LogitMemory(context=3), LogitMemory(context=3)
    near.set_fallback(far)
    plain = Levels(Dictionary((3, 2, 1), 10), Dictionary((3, 2, 1), 10))
    for _ in range(60):
        own, other = random_update(rng, 5), random_update(rng, 9)
        near.update(*own)
        far.update(*other)
        plain.near.update(*own)
        plain.far.update(*own)
        plain.far.update(*other)
    found = {True: 0, False: 0}
    for _ in range(400):
        tokens = rng.integers(0, 9, rng.integers(1, 7)).tolist()
        ours, theirs = as_dict(near, tokens), plain.lookup(tokens)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours == pytest.approx(theirs, abs=1e-5)
            found[ours == as_dict(far, tokens)] += 1
    assert min(found.values()) > 50  # of the near one, of the far one


def test_a_hit_is_stamped_in_the_memory_that_knows() -> None:
    near, far = LogitMemory(context=1, entries=1), LogitMemory(context=1, entries=1)
    for token in range(2):
        far.update([token], [0], [1.0])
    near.set_fallback(far)
    near.update([1], [0], [1.0])
    far.update([5], [0], [1.0])  # by another
    near.set_fallback(far)
    before = far.table.stamps.copy()
    near.lookup([1])
    assert (far.table.stamps == before).all() and near.table.stamps.max() == far.clock
    near.lookup([0])
    assert (far.table.stamps != before).sum() == 1


def test_kept_ids_hold_the_arithmetic_mean() -> None:
    rng = np.random.default_rng(2)
    memory, seen = LogitMemory(context=2, entries=4), []
    for _ in range(50):
        probs = np.sort(rng.dirichlet(np.ones(8)))[::-1]
        probs[:4] = rng.permutation(probs[:4])  # the same four ids lead at every update
        memory.update([1, 2], range(8), probs)
        seen.append(probs[:4])
    slot = kernels.find(memory.table.keys, memory.table.keys[memory.table.keys != 0][0])
    mean = dict(enumerate(np.mean(seen, axis=0)))
    held = dict(
        zip(memory.table.ids[slot].tolist(), memory.table.probs[slot].tolist(), strict=True)
    )
    assert memory.table.counts[slot] == 50
    assert held == pytest.approx(mean, abs=1e-6)


def test_longest_context_wins_and_shorter_ones_back_it_off() -> None:
    memory = LogitMemory()
    memory.update([1, 2, 3, 4], [5], [1.0])
    memory.update([9, 4], [6], [1.0])
    assert as_dict(memory, [1, 2, 3, 4]) == {5: 1.0}
    assert as_dict(memory, [0, 2, 3, 4]) == {5: 1.0}
    assert as_dict(memory, [9, 9, 4]) == {6: 1.0}
    assert as_dict(memory, [7, 4]) == {5: 0.5, 6: 0.5}  # one token: both observations
    assert as_dict(memory, [4, 7]) is None
    assert as_dict(memory, []) is None


def test_lengths_of_equal_tokens_are_apart() -> None:
    """A context of n zeros is another key than one of n + 1 zeros."""
    memory = LogitMemory(context=4)
    memory.update([0], [1], [1.0])
    assert len(memory) == 1
    memory.update([0, 0, 0, 0], [2], [1.0])
    assert len(memory) == 4
    assert as_dict(memory, [0, 0]) == {2: 1.0}
    assert as_dict(memory, [5, 0]) == {1: 0.5, 2: 0.5}


def test_each_node_of_a_path_is_learned_once() -> None:
    memory = LogitMemory(context=2, entries=2)
    ids, probs = np.array([[3, 0], [4, 0], [5, 0]], np.int32), np.array([[0.5, 0]] * 3, np.float32)
    tree = chain([7, 8])
    memory.learn(memory.context([1, 6]), tree, np.array([-1, 0, 1], np.int32), ids, probs)
    assert memory.observed == 3
    assert [as_dict(memory, t) for t in ([1, 6], [6, 7], [7, 8])] == [{3: 1.0}, {4: 1.0}, {5: 1.0}]
    assert memory.table.counts.max() == 1 and len(memory) == 6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 1000, 1025, 10_240, 12_345])
def test_top_of_a_row(dtype: type, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for trial in range(60):  # the last two sizes have as many stretches as entries, and more
        row = rng.random(vocab).astype(dtype)
        if trial % 3 == 1:
            row = np.round(row * 4).astype(dtype) / 4  # many ties, some zeros
        elif trial % 3 == 2:
            row[rng.random(vocab) < 0.95] = 0
        ids, probs = np.full(10, 77, np.int32), np.full(10, 77, np.float32)
        select_top(row, ids, probs)
        best = [i for i in np.lexsort((np.arange(vocab), -row))[:10] if row[i] > 0]
        assert ids[: len(best)].tolist() == best
        assert probs.tolist() == [*row[best].astype(np.float32), *[0] * (10 - len(best))]


def test_the_best_may_stand_anywhere_beside_nothing() -> None:
    """All in one stretch, one in each, equal ones, NaN and infinities: as a stable sort has it."""
    rng = np.random.default_rng(3)
    for where in (range(40, 48), range(11, 30_000, 1024), rng.integers(0, 30_000, 200)):
        row = np.full(30_000, np.nan, np.float32)
        row[rng.random(30_000) < 0.5] = -np.inf
        row[list(where)] = rng.integers(-3, 3, len(where))
        ids, held = np.full(8, -1, np.int32), np.full(8, -np.inf, np.float32)
        select_above(row, ids, held)
        finite = np.flatnonzero(row > -np.inf)
        best = finite[np.argsort(-row[finite], kind="stable")][:8]
        assert ids.tolist() == best.tolist() and held.tolist() == row[best].tolist()


def test_grows_without_losing_anything() -> None:
    rng = np.random.default_rng(4)
    memory, plain = LogitMemory(context=3, entries=2), Dictionary((3, 2, 1), 2)
    for _ in range(3000):
        update = (rng.integers(0, 60, 3).tolist(), [1, 2], [0.6, 0.3])
        memory.update(*update)
        plain.update(*update)
    assert len(memory) == len(plain.known) > 4096
    assert memory.evicted == 0
    assert_consistent(memory)


def test_stays_within_its_budget_and_keeps_what_was_hit_last() -> None:
    rng = np.random.default_rng(5)
    budget = 150_000
    memory = LogitMemory(context=2, entries=4, budget=budget)
    memory.update([1, 1], [3], [1.0])
    for step in range(8000):
        memory.update(rng.integers(2, 3000, 2).tolist(), [1, 2], [0.6, 0.3])
        if step % 50 == 0:
            assert as_dict(memory, [1, 1]) == {3: 1.0}  # looking up counts as a hit
    assert memory.nbytes <= budget and memory.evicted > 0
    assert len(memory) <= 0.6 * len(memory.table.keys)
    assert_consistent(memory)


def test_eviction_takes_exactly_the_oldest() -> None:
    memory = LogitMemory(context=1, entries=1, budget=64 * 24)
    for token in range(30):
        memory.update([token], [0], [1.0])
    memory._evict(12)
    assert memory.evicted == 12 and len(memory) == 18
    assert [as_dict(memory, [t]) is not None for t in range(30)] == [False] * 12 + [True] * 18
    assert_consistent(memory)


def test_eviction_splits_ties_and_may_take_all() -> None:
    memory = LogitMemory(context=1, entries=1)
    nodes = np.arange(20, dtype=np.int32)
    top = np.zeros((20, 1), np.int32), np.ones((20, 1), np.float32)
    memory.learn(memory.context([]), chain(range(20)), nodes, *top)
    memory._evict(5)
    assert len(memory) == 15
    assert_consistent(memory)
    memory._evict(15)
    assert len(memory) == 0 and memory.lookup([3]) is None


def test_a_step_larger_than_the_budget_is_learned_in_parts() -> None:
    memory = LogitMemory(context=1, entries=1, budget=64 * 24)
    nodes = np.arange(-1, 500, dtype=np.int32)
    top = np.zeros((501, 1), np.int32), np.ones((501, 1), np.float32)
    memory.learn(memory.context([501]), chain(range(500)), nodes, *top)
    assert memory.nbytes <= 64 * 24 and memory.evicted > 400
    assert as_dict(memory, [499]) == {0: 1.0}
    assert_consistent(memory)


def test_tempered_q() -> None:
    memory, stored = LogitMemory(), np.array([0.5, 0.2, 0.1, 0.1])
    memory.update([1], [4, 3, 2, 1], stored)

    def q(**cuts: float) -> list[float]:
        proposal = memory.lookup([1], Temper(**cuts))
        assert proposal is not None and proposal.ids[0] == 4
        return proposal.probs.tolist()

    assert q(power=2.0) == pytest.approx(stored**2 / (stored**2).sum(), abs=1e-6)
    assert q(power=1000.0)[:1] == [1.0]
    assert q(top_k=2) == pytest.approx([5 / 7, 2 / 7], abs=1e-6)
    assert q(top_p=0.7) == pytest.approx([5 / 7, 2 / 7], abs=1e-6)
    assert q(min_p=0.3) == pytest.approx([5 / 7, 2 / 7], abs=1e-6)
    assert q(top_p=0.01) == [1.0]


def test_bad_options() -> None:
    for context in (0, (), (4, 0), (2.5,), 33):
        with pytest.raises(ConfigError, match="context must be"):
            LogitMemory(context=context)
    with pytest.raises(ConfigError, match="entries"):
        LogitMemory(entries=0)
    with pytest.raises(ConfigError, match="raise the budget"):
        LogitMemory(budget=1000)


def test_an_empty_memory_knows_nothing() -> None:
    memory = LogitMemory()
    assert len(memory) == 0 and memory.lookup([1, 2, 3]) is None
    memory.learn(
        memory.context([1]),
        EMPTY,
        np.zeros(0, np.int32),
        np.zeros((0, 10), np.int32),
        np.zeros((0, 10), np.float32),
    )
    assert len(memory) == 0


@pytest.mark.parametrize("empty", [0.0, np.nan, -np.inf])
def test_a_law_without_any_token_is_never_learned(empty: float) -> None:
    memory, known = LogitMemory(context=2), {5: 0.75, 6: 0.25}
    memory.update([1, 2], list(known), list(known.values()))
    memory.update([1, 2], [3, 4], [empty, empty])
    laws = np.full((3, 20), empty, np.float32)
    laws[1, 7] = 1.0
    memory.follow([1, 2, 3, 4], 2, *largest(laws, memory.entries))
    assert as_dict(memory, [1, 2]) == known and as_dict(memory, [1, 2, 3]) == {7: 1.0}
    assert memory.lookup([2, 3, 4]) is None and len(memory) == 4  # [1 2], [2], [2 3], [3]


@pytest.mark.parametrize("temper", [Temper(), Temper(power=1.5, top_p=0.9, min_p=0.1)])
def test_a_slot_without_probabilities_drafts_nothing(temper: Temper) -> None:
    memory = LogitMemory(context=1)
    for token in range(4):
        memory.update([token], [(token + 1) % 4], [1.0])
    memory.table.probs[:] = 0.0
    uniforms = np.random.default_rng(0).random(200)
    assert memory.lookup([1], temper) is None
    for drawn in (None, uniforms):
        assert len(memory.draft([1], grid(2, 2).first(6), 2, temper, drawn)[0]) == 0
        assert len(memory.grow([1], Plan(nodes=8), temper, drawn)[0]) == 0


def test_kernels_are_warmed_up_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run asks for it before its first step."""
    warm_up()
    monkeypatch.setattr(memory, "LogitMemory", lambda **options: pytest.fail("warmed up again"))
    warm_up()


@pytest.mark.parametrize("nodes", [1, 8, 63, 64, 65])
def test_no_two_trees_share_memory(nodes: int) -> None:
    """Buffers of different trees are distinct memory, large enough for their nodes."""
    made = [draft_template.buffers(nodes, 2) for _ in range(40)]
    for i, arrays in enumerate(made):
        assert min(map(len, arrays[:4])) >= nodes and len(arrays.cells) >= nodes
        assert min(map(len, arrays[5:7])) >= 2 * (nodes + 1) and not arrays.starts.any()
        for number, array in enumerate(arrays):
            array.fill(i + number)
    for i, arrays in enumerate(made):
        assert all((array == i + number).all() for number, array in enumerate(arrays))
