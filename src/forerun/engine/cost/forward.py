"""The time of a forward pass by its number of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from functools import partial
from time import perf_counter

import numpy as np

from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Rows, Sequence
from forerun.core.roles import Target
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Tree, TreeBuilder
from forerun.engine.cost.measurement import Limits, min_seconds

MEASURED_ROWS = (1, 5, 17, 65, 9, 33, 3, 129, 2, 25, 13, 49, 7, 97)  # the most useful first
MIN_CURVE_POINTS = 2
PREFIX_TOKENS = 6  # before the root of a sequence
TREE_DEPTH = 4  # of the measured trees

Pass = tuple[int, int]  # number of sequences, total number of rows


def curve(seconds: Many[float]) -> Cost:
    """A non-decreasing curve through MEASURED_ROWS: no pass is slower than a larger one."""
    found = dict(zip(MEASURED_ROWS, seconds, strict=True))
    rows = sorted(num for num, known in found.items() if math.isfinite(known))
    times = np.minimum.accumulate([found[num] for num in reversed(rows)])[::-1]
    if len(rows) < MIN_CURVE_POINTS:  # too slow to measure: each row costs as much as the first
        return Cost((1, 2), (found[1], 2 * found[1]))
    return Cost(tuple(rows), tuple(float(s) for s in times))


def dummy_tokens(target: Target, length: int, first: int = 0) -> list[int]:
    """Arbitrary tokens, different for each `first`, since equal texts would share rows."""
    base = max(1, target.vocab_size - 1)  # `first` is written in this base, lowest digit first
    return [1 + (i + first // base**i) % base for i in range(length)]


def dummy_tree(nodes: int, vocab: int, levels: int = TREE_DEPTH) -> Tree:
    """A tree of chains of `levels` nodes below the root, similar to a draft."""
    tree = TreeBuilder()
    for node in range(nodes):
        tree.add(node % vocab, node - 1 if node % levels else -1)
    return tree.build()


def pass_seconds(target: Target, kinds: Many[Pass], tries: int, limits: Limits) -> list[float]:
    """Seconds of passes within the limits.

    Rows beyond one per sequence are a tree of the first sequence.
    """
    started, length = perf_counter(), max(1, min(PREFIX_TOKENS, target.context - TREE_DEPTH))
    texts = [dummy_tokens(target, length, i) for i in range(max(num for num, _ in kinds))]
    seqs = [
        Sequence(text, length, Sampling(), SeededDice(i), limit=1, index=i)
        for i, text in enumerate(texts)
    ]
    levels = max(1, min(TREE_DEPTH, target.context - length))

    def run(num: int, tree: Tree) -> float:
        start = perf_counter()
        _wait(target.forward(ForwardBatch(seqs[:num], [tree] + [EMPTY] * (num - 1))))
        return perf_counter() - start

    try:
        run(len(seqs), EMPTY)  # prefill
        trees = [dummy_tree(rows - num, target.vocab_size, levels) for num, rows in kinds]
        works = [partial(run, num, tree) for (num, _), tree in zip(kinds, trees, strict=True)]
        sizes, left = [rows for _, rows in kinds], seconds_left(limits, started)
        return min_seconds(works, sizes, tries, left, is_slow_at_first=target.is_slow_at_first)
    finally:
        for seq in seqs:
            target.release(seq)


def one_row_seconds(target: Target) -> float:
    """Seconds of a pass over one row: the minimum of many within half a second and more."""
    return pass_seconds(target, [(1, 1)], 3, (0.5, 10.0))[0]


def seconds_left(limits: Limits, started: float) -> Limits:
    """The limits less the seconds since `started`, which preparing took."""
    spent = perf_counter() - started
    return max(limits[0] - spent, 0.0), limits[1] - spent


def _wait(rows: list[Rows]) -> None:
    """Waits for the GPU, where `forward` returns before the pass is done."""
    if rows[0].logits.is_cuda:
        import torch

        torch.cuda.synchronize(rows[0].logits.device)
