"""Sequences whose drafts and acceptance a test decides, under the controller `budget`."""

from __future__ import annotations

from fakes import FakeTarget, sequence, table_law
from forerun.controllers.budget import Budget
from forerun.dice import SeededDice
from forerun.records import Cost, Plan, Step, Verdict
from forerun.roles import Drafter
from forerun.tree import EMPTY, chain


class Free(Drafter):
    labels = frozenset({"point"})


def bound(curve: Cost, drafter: Drafter | None = None, **options: int) -> Budget:
    target = FakeTarget(table_law(1))
    target.cost = curve
    budget = Budget(**options)
    budget.bind(target, drafter or Free())
    return budget


def together(budget: Budget, num: int, accepted: int, count: int) -> list[list[Plan]]:
    """Plans of `num` sequences that draft at once; so many nodes of each draft are accepted."""
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(num)]
    found = []
    for _ in range(count):
        found.append(one_step(budget, seqs, accepted))
    return found


def one_step(budget: Budget, seqs: list, accepted: int, is_known: bool = True) -> list[Plan]:
    """A step in which all who may draft do, unless nothing is known of the text."""
    plans = [budget.plan(seq) for seq in seqs]
    trees = [chain(range(plan.nodes)) if plan.nodes and is_known else EMPTY for plan in plans]
    verdicts = [Verdict(list(range(min(len(tree), accepted))), 0) for tree in trees]
    emitted = [verdict.tokens(tree) for verdict, tree in zip(verdicts, trees, strict=True)]
    budget.observe(Step(seqs, plans, trees, [], verdicts, emitted))
    return plans


class Dear(Drafter):
    """Any draft costs as much as ten steps; counts how often that is asked."""

    labels = frozenset({"point"})

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # nodes, sequences
        self.hoped: list[int] = []

    def seconds(self, nodes: int, num: int = 1) -> float:
        self.asked.append((nodes, num))
        return 10.0

    def hope(self, num: int = 1) -> tuple[float, float]:
        self.hoped.append(num)
        return super().hope(num)
