"""Drafters of which one knows what is right or wrong, on a law that is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fakes import FakeTarget, run_all, sequence, table_law
from forerun.controllers.fixed import Fixed
from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.mixins import Priced
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, chain
from forerun.drafters.base import PerSequence
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder, Stats
from forerun.verifiers.recursive import Recursive

LAW = table_law(1)
GREEDY = Sampling(temperature=0)
FIRST, SECOND = "says", "says 2"  # what two drafters of this file are called


class Says(PerSequence, Priced):
    """Chains of what a function says follows."""

    labels = frozenset({"point"})

    def __init__(self, say: Callable[[list[int], int], list[int]]) -> None:
        self.say = say

    def draft(self, seq: Sequence, plan: Plan, dice) -> Tree:
        return chain(self.say(seq.tokens, min(plan.nodes, plan.depth)))


def truth(tokens: list[int], count: int) -> list[int]:
    """What greedy decoding says."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(np.argmax(LAW(text))))
    return text[len(tokens) :]


def wrong(tokens: list[int], count: int) -> list[int]:
    return [(t + 1) % 3 for t in truth(tokens, count)]


def silent(tokens: list[int], count: int) -> list[int]:
    return []


def run(drafter: Drafter, count: int = 120, seqs: int = 1) -> tuple[list, list[Stats]]:
    target = FakeTarget(LAW)
    target.cost = Cost((1, 65), (1.0, 2.0))
    recorder = Recorder()
    engine = Engine(
        target, drafter, Recursive(), Fixed(nodes=4), listeners=[recorder], max_seqs=seqs
    )
    made = [sequence((0, 1), count, SeededDice(i), GREEDY, index=i) for i in range(seqs)]
    run_all(engine, made)
    return [seq.generated for seq in made], [recorder.of(seq) for seq in made]
