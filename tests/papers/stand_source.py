"""A synthetic source for STAND: 64 tokens, laws that depend on the last four, no model."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch

from fakes import FakeTarget, run_all, sequence
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Rows, Sequence, Step
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder

VOCAB, TRAJECTORIES, LENGTH, TEMPERATURE = 64, 16, 500, 0.6
PROMPT = [1, 2, 3, 4, 5]


class Source:
    """Logits = 1.6 x a table over the last token, 0.8 x over two, 1 x over four tokens."""

    def __init__(self, seed: int = 5) -> None:
        self.seed, self.known = seed, dict[tuple[int, ...], np.ndarray]()
        self.bigram = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))

    def logits(self, tokens: Many[int]) -> np.ndarray:
        key = tuple(tokens[-4:])
        if key not in self.known:
            pair = np.random.default_rng([self.seed + 1, *key[-2:]]).normal(size=VOCAB)
            four = np.random.default_rng([self.seed, *key]).normal(size=VOCAB)
            self.known[key] = 1.6 * self.bigram[key[-1]] + 0.8 * pair + four
        return self.known[key]


class LazyRows(Rows):
    """Rows that are computed when they are read."""

    def __init__(self, source: Source, seq: Sequence, tree: Tree) -> None:
        super().__init__(torch.empty(0))
        self.source, self.tokens, self.tree = source, seq.tokens[-4:], tree

    def row(self, node: int) -> np.ndarray:
        return self.source.logits(self.tokens + self.tree.path(node))


class SourceTarget(FakeTarget):
    """The source as a target; `is_lazy` computes only rows that are read."""

    def __init__(self, source: Source, *, is_lazy: bool = True) -> None:
        super().__init__(source.logits, VOCAB)
        self.source, self.is_lazy = source, is_lazy

    def forward(self, batch: ForwardBatch) -> list[Rows]:
        pairs = zip(batch.seqs, batch.trees, strict=True)
        rows: list[Rows] = [LazyRows(self.source, *pair) for pair in pairs]
        if self.is_lazy:
            return rows
        trees = zip(rows, batch.trees, strict=True)
        return [
            Rows(torch.tensor(np.stack([r.row(n) for n in range(-1, len(t))]))) for r, t in trees
        ]


def decode(
    drafter: Drafter,
    *,
    count: int = TRAJECTORIES,
    length: int = LENGTH,
    batch: int = 1,
    nodes: int = 80,
    seed: int = 11,
    is_lazy: bool = True,
    listeners: Many[Callable[[Step], None]] = (),
) -> np.ndarray:
    """tau of each trajectory on one memory, `batch` of them at a time."""
    recorder = Recorder()
    engine = Engine(
        SourceTarget(Source(), is_lazy=is_lazy),
        drafter,
        registry.make("verifier", "speculative"),
        Fixed(nodes=nodes, depth=20),
        listeners=[recorder, *listeners],
        max_seqs=batch,
    )
    sampling = Sampling(temperature=TEMPERATURE)
    seqs = [sequence(PROMPT, length, SeededDice(seed, i), sampling, i) for i in range(count)]
    run_all(engine, seqs)
    return np.array([recorder.of(seq).tau for seq in seqs])
