"""Trees that grow where acceptance is likely: chances, the plain grower, the kernel."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import TableSource, sequence, table_law
from forerun.core.acceptance_prior import (
    CONFIDENCE_BOUNDS,
    NUM_GRADES,
    NUM_LEVELS,
    NUM_RANKS,
    AcceptanceCounts,
    grade,
)
from forerun.core.dice import SeededDice
from forerun.core.growing import Source
from forerun.core.records import Plan
from forerun.core.tree import Proposal, Tree
from forerun.drafters.base import grow
from forerun.growers.dynamic import Dynamic
from forerun.ngrams.tables.logits.table import LogitMemory

ARRAYS = ("tokens", "parents", "laws", "starts", "q_ids", "q_probs")


class Recall(Source):
    """A memory asked path by path."""

    def __init__(self, memory: LogitMemory) -> None:
        self.memory = memory

    def next(self, requests) -> list[Proposal | None]:
        return [self.memory.lookup([*seq.tokens, *path]) for seq, path in requests]


def taught(seed: int, vocab: int) -> LogitMemory:
    """A memory, every second time before another one that was taught more."""
    rng = np.random.default_rng(seed)
    options = {"context": int(rng.integers(1, 4)), "entries": int(rng.integers(1, 8))}
    memory = LogitMemory(**options)
    if seed % 2:
        memory.set_fallback(LogitMemory(**options))
    for i in range(80):
        size = int(rng.integers(1, vocab + 1))
        probs = rng.dirichlet(np.full(size, 0.4)) * rng.uniform(0.3, 1)
        context = rng.integers(0, vocab, rng.integers(1, 4)).tolist()
        one = memory if memory.fallback is None or i % 4 == 0 else memory.fallback
        one.update(context, rng.choice(vocab, size, replace=False), probs)
    for chances in memory.acceptance.values():
        chances.hits = chances.tries * rng.uniform(0.05, 0.95, chances.hits.shape)
    return memory


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_the_kernel_grows_the_tree_of_the_plain_grower(seed: int, drawn: bool) -> None:
    rng = np.random.default_rng([seed, 1])
    vocab = int(rng.integers(3, 20))
    memory = taught(seed, vocab)
    tokens = rng.integers(0, vocab, rng.integers(1, 9)).tolist()
    plan = Plan(
        int(rng.integers(1, 40)),
        int(rng.integers(1, 8)),
        min_acceptance=float(rng.choice([0, 0.02, 0.2])),
    )
    fast, plain = SeededDice(seed), SeededDice(seed)
    room = fast.peek(plan.nodes * memory.entries) if drawn else None
    tree, used = memory.grow(tokens, plan, uniforms=room)
    fast.skip(used)
    dynamic = Dynamic(drawn=drawn, acceptance=memory.acceptance[drawn])
    seq = sequence(tuple(tokens), 5, plain)
    (expected,) = grow([seq], [plan], [plain], Recall(memory), dynamic)
    for name in (*ARRAYS, "rows", "cells"):
        assert np.array_equal(getattr(tree, name), getattr(expected, name)), name
    assert fast.uniform() == plain.uniform()


def drafted(plan: Plan, chances: AcceptanceCounts | None = None) -> Tree:
    dice = SeededDice(3)
    seq = sequence((0, 1), 5, dice)
    return grow([seq], [plan], [dice], TableSource(table_law(2)), Dynamic(acceptance=chances))[0]


def test_it_keeps_to_the_plan() -> None:
    for nodes in (1, 2, 5, 9):
        tree = drafted(Plan(nodes, 3))
        assert len(tree) == nodes and tree.depths.max() <= 3
        assert len(tree.cells) == nodes


def test_nodes_below_the_least_chance_are_left_out() -> None:
    sizes = [len(drafted(Plan(30, 6, min_acceptance=least))) for least in (0.0, 0.05, 0.2, 0.9)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] > sizes[3] == 0


def test_it_goes_deep_where_first_children_are_accepted_and_wide_where_not() -> None:
    sure, unsure = AcceptanceCounts(), AcceptanceCounts()
    sure.hits[:, 0], sure.hits[:, 1:] = 0.95 * sure.tries[:, 0], 0.0
    unsure.hits[:] = 0.3 * unsure.tries
    deep, wide = (drafted(Plan(3, 5), chances) for chances in (sure, unsure))
    assert deep.depths.tolist() == [1, 2, 3]
    assert wide.depths.tolist()[:2] == [1, 1]


def test_grades_rise_with_how_sure_q_is() -> None:
    assert [grade(p, 0) for p in (0.1, *CONFIDENCE_BOUNDS, 1.0)] == [0, 1, 2, 3, 4, 5, 5]


def test_every_level_has_grades_of_its_own() -> None:
    found = [grade(p, level) for level in range(NUM_LEVELS) for p in (0.1, *CONFIDENCE_BOUNDS)]
    assert found == list(range(NUM_GRADES))
    assert AcceptanceCounts().tries.shape == (NUM_GRADES, NUM_RANKS)
    assert (
        np.iinfo(np.int8).max >= NUM_GRADES * NUM_RANKS - 1
    )  # all are numbered as `Tree.cells` are


def levels_of(memory: LogitMemory, *texts: list[int]) -> list[int]:
    """The level of what a memory knows after each text, as its trees tell it."""
    trees = [memory.grow(tokens, Plan(1, 1))[0] for tokens in texts]
    levels = [int(tree.cells[0]) // NUM_RANKS // (NUM_GRADES // NUM_LEVELS) for tree in trees]
    assert levels == [memory.lookup(tokens).level for tokens in texts]
    return levels


def test_levels_tell_whose_context_answers_and_whether_it_is_the_longest() -> None:
    own, others = (LogitMemory(context=(3, 1), entries=2) for _ in range(2))
    own.set_fallback(others)
    own.update([1, 2, 3], [9], [1.0])  # others learn it too, and are not asked
    others.update([4, 5, 6], [9], [1.0])
    assert levels_of(own, [1, 2, 3], [7, 7, 3], [4, 5, 6], [7, 7, 6]) == [0, 1, 2, 3]
    assert levels_of(others, [1, 2, 3], [7, 7, 3]) == [0, 1]  # alone, all is its own


def test_what_others_taught_is_left_out_where_it_is_accepted_less() -> None:
    """The same q in the own memory and in the one behind it; the chances of the latter are low."""
    own, others = (LogitMemory(context=1, entries=2) for _ in range(2))
    own.set_fallback(others)
    for token in (0, 1, 2):
        (own if token < 2 else others).update([token], [token, 2 - token], [0.6, 0.4])
    chances = own.acceptance[False]
    chances.hits[:] = 0.8 * chances.tries
    chances.hits[2 * NUM_GRADES // NUM_LEVELS :] *= 0.1
    plan = Plan(8, 1, min_acceptance=0.2)
    assert [len(own.grow([token], plan)[0]) for token in (0, 1, 2)] == [1, 1, 0]


def test_chances_count_trials_down_to_the_accepted_child() -> None:
    # root -> 0, 1, 2; 1 -> 3; accepted: root, 1
    parents = np.array([-1, -1, -1, 1], np.int32)
    cells = np.array([2 * NUM_RANKS, 2 * NUM_RANKS + 1, 2 * NUM_RANKS + 2, 5 * NUM_RANKS], np.int8)
    chances = AcceptanceCounts()
    tries, hits = chances.tries.copy(), chances.hits.copy()
    chances.learn(parents, cells, [1])
    more = chances.tries - tries
    assert more[2].tolist() == [1, 1] + [0] * (NUM_RANKS - 2)  # child 2 was not tried
    assert more[5].tolist() == [1] + [0] * (NUM_RANKS - 1)
    assert more.sum() == 3
    won = chances.hits - hits
    assert won[2, 1] == pytest.approx(1) and won.sum() == pytest.approx(1)


def test_rates_follow_what_happens() -> None:
    chances = AcceptanceCounts()
    before = chances.rates[5, 0]
    cells = np.array([5 * NUM_RANKS], np.int8)
    for _ in range(200):
        chances.learn(np.array([-1], np.int32), cells, [])  # the child was rejected
    assert chances.rates[5, 0] < 0.1 < before
