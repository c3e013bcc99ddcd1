"""STAND (arXiv 2506.04708): accepted length grows over trajectories that share a memory.

A synthetic source, no model: 64 tokens, logits = a bigram table + a table over the last two tokens,
T = 0.6, entropy about 2 nats. 16 trajectories of 600 tokens on an 80-node tree, one after another.
Measured when written, tau of the first trajectory, mean of 16, last four: stochastic 1.90, 4.14,
4.81; deterministic 1.66, 2.49, 2.78. The sheet's own simulation (another source, its digits cannot
be reproduced) gave 1.26, 2.36, 3.07 and 1.17, 1.93, 2.36: the same ordering and growth.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import pytest
import torch

from fakes import FakeTarget, run_all, sequence
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Rows
from forerun.core.sampling import Sampling
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder

pytestmark = pytest.mark.paper

VOCAB, TRAJECTORIES, LENGTH = 64, 16, 600


class Source:
    """Logits = a normal bigram table + 1.2 x a normal table over the last two tokens."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.bigram = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))
        self.pairs: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, tokens: Many[int]) -> np.ndarray:
        key = tuple(tokens[-2:])
        if key not in self.pairs:
            rng = np.random.default_rng([self.seed, *key])
            self.pairs[key] = rng.normal(size=VOCAB)
        return self.bigram[key[-1]] + 1.2 * self.pairs[key]


class LazyRows(Rows):
    """Rows that are computed when somebody looks."""

    def __init__(self, source, seq, tree) -> None:
        super().__init__(torch.empty(0))
        self.source, self.tokens, self.tree = source, list(seq.tokens), tree

    def row(self, node: int) -> np.ndarray:
        return self.source.logits(self.tokens + self.tree.path(node))


class LazyTarget(FakeTarget):
    def __init__(self, source: Source) -> None:
        super().__init__(source.logits, VOCAB)
        self.source = source

    def forward(self, batch):
        pairs = zip(batch.seqs, batch.trees, strict=True)
        return [LazyRows(self.source, seq, tree) for seq, tree in pairs]


def accepted_lengths(spec: str, source: Source) -> np.ndarray:
    """tau of each trajectory, one after another, all on one memory."""
    recorder = Recorder()
    engine = Engine(
        LazyTarget(source),
        registry.make("drafter", spec),
        registry.make("verifier", "speculative"),
        Fixed(nodes=80, depth=20),
        listeners=[recorder],
    )
    sampling = Sampling(temperature=0.6)
    seqs = [
        sequence([1, 2, 3, 4, 5], LENGTH, SeededDice(11, i), sampling, index=i)
        for i in range(TRAJECTORIES)
    ]
    run_all(engine, seqs)
    return np.array([recorder.of(seq).tau for seq in seqs])


@pytest.fixture(scope="module")
def taus() -> dict[str, np.ndarray]:
    source = Source(5)
    specs = {"stochastic": "stand", "deterministic": "stand:choice=top", "none": "none"}
    return {name: accepted_lengths(spec, source) for name, spec in specs.items()}


def test_source_is_as_uncertain_as_the_one_simulated() -> None:
    source, rng = Source(5), np.random.default_rng(0)
    entropies = []
    for _ in range(200):
        logits = source.logits(rng.integers(VOCAB, size=2).tolist()) / 0.6
        p = np.exp(logits - logits.max())
        p /= p.sum()
        entropies.append(-(p * np.log(p)).sum())
    print(f"mean entropy {np.mean(entropies):.2f} nats")
    assert 1.5 < np.mean(entropies) < 2.8


def test_accepted_length_grows_with_the_trajectory_index(taus) -> None:
    for name in ("stochastic", "deterministic"):
        tau = taus[name]
        print(f"{name}: first {tau[0]:.2f}, mean {tau.mean():.2f}, last four {tau[-4:].mean():.2f}")
        assert tau[0] < tau[4:8].mean() < tau[-4:].mean()
    assert np.allclose(taus["none"], 1.0)


def test_stochastic_drafts_beat_deterministic_ones_here(taus) -> None:
    ratio = taus["stochastic"][-4:].mean() / taus["deterministic"][-4:].mean()
    print(f"stochastic / deterministic, last four: {ratio:.2f}")
    assert ratio >= 1.05
