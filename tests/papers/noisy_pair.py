"""A synthetic pair: a random source of 64 tokens, and a draft that knows its logits with noise.

Logits = a normal table over the last token + 1.2 x one over the last two; the draft adds normal
noise per context. How much decides what one draft token's acceptance is.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from fakes import FakeTarget, TableSource, run_all, sequence
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Rows
from forerun.core.sampling import Sampling, to_probs
from forerun.drafters.base import Grown
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder, Stats

VOCAB = 64


class Pair:
    """Logits of the target and of the draft after a text."""

    def __init__(self, seed: int, noise: float) -> None:
        self.seed, self.noise = seed, noise
        self.bigram = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))
        self._known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def both(self, tokens: Many[int]) -> tuple[np.ndarray, np.ndarray]:
        key = tuple(tokens[-2:])
        if key not in self._known:
            pairs, noise = np.random.default_rng([self.seed, *key]).normal(size=(2, VOCAB))
            target = self.bigram[key[-1]] + 1.2 * pairs
            self._known[key] = target, target + self.noise * noise
        return self._known[key]


class LazyRows(Rows):
    """Rows that are computed when somebody looks."""

    def __init__(self, pair: Pair, seq, tree) -> None:
        super().__init__(torch.empty(0))
        self.pair, self.tokens, self.tree = pair, seq.tokens[-2:], tree

    def row(self, node: int) -> np.ndarray:
        return self.pair.both(self.tokens + self.tree.path(node))[0]


class LazyTarget(FakeTarget):
    def __init__(self, pair: Pair) -> None:
        super().__init__(lambda tokens: pair.both(tokens)[0], VOCAB)
        self.pair = pair

    def forward(self, batch):
        pairs = zip(batch.seqs, batch.trees, strict=True)
        return [LazyRows(self.pair, seq, tree) for seq, tree in pairs]


def run(
    pair: Pair,
    grower: str,
    verifier: str,
    *,
    nodes: int,
    depth: int,
    temperature: float = 1.0,
    length: int = 3000,
    listeners: Many = (),
) -> Stats:
    """Statistics of one long text."""
    sampling, recorder = Sampling(temperature=temperature), Recorder()
    source = TableSource(lambda tokens: to_probs(pair.both(tokens)[1], sampling))
    engine = Engine(
        LazyTarget(pair),
        Grown(source, registry.make("grower", grower)),
        registry.make("verifier", verifier),
        Fixed(nodes=nodes, depth=depth),
        listeners=[recorder, *listeners],
    )
    seq = sequence([1, 2], length, SeededDice(11), sampling)
    run_all(engine, [seq])
    return recorder.of(seq)


def error(stats: Stats, depth: int) -> float:
    """A bound on the standard error of tau: a pass emits 1 to depth + 1 tokens."""
    return 0.5 * depth / np.sqrt(stats.passes)
