"""STAND in a wide scope: what a prompt's own samples taught goes before what others did.

A synthetic source, no model: next-token logits of every prompt are a bigram table common to all
plus tables over the last two tokens, one common and one of the prompt's own. Eight prompts of three
trajectories each, one after another. Measured when written, tau over all: a group's memory alone
1.42, a tenant's alone 1.56, both 1.65.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import pytest
from test_stand import LazyTarget, Source

from fakes import run_all, sequence
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.dice import SeededDice
from forerun.drafters.stand import Stand
from forerun.engine.loop import Engine
from forerun.engine.stats import Recorder, Stats
from forerun.roles import Drafter
from forerun.sampling import Sampling

pytestmark = pytest.mark.paper

PROMPTS, TRAJECTORIES, LENGTH, COMMON = 8, 3, 120, Source(5)


class Prompt(Source):
    """The common logits, and 0.75 x a normal table over the last two tokens."""

    def logits(self, tokens: Many[int]) -> np.ndarray:
        own = super().logits(tokens) - self.bigram[tokens[-1]]
        return COMMON.logits(tokens) + 0.75 * own


class OneLevel(Stand):
    """Drafts from the wide memory alone."""

    def memory(self, seq):
        return super().memory(seq).behind


def tau(drafter: Drafter) -> float:
    recorder, total = Recorder(), Stats()
    for prompt in range(PROMPTS):
        engine = Engine(
            LazyTarget(Prompt(100 + prompt)),
            drafter,
            registry.make("verifier", "speculative"),
            Fixed(nodes=16, depth=8),
            listeners=[recorder],
        )
        for i in range(TRAJECTORIES):
            dice = SeededDice(11, prompt, i)
            seq = sequence([1, 2, 3], LENGTH, dice, Sampling(temperature=0.6), index=i)
            seq.group = prompt
            run_all(engine, [seq])
            total.add(recorder.of(seq))
    return total.tau


def test_two_levels_are_ahead_of_either() -> None:
    found = {
        "group": tau(Stand(scope="group")),
        "tenant, one level": tau(OneLevel(scope="tenant")),
        "tenant": tau(Stand(scope="tenant")),
    }
    print({name: round(value, 3) for name, value in found.items()})
    assert found["tenant"] > 1.03 * max(found["group"], found["tenant, one level"])
