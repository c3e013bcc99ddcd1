"""Sequences whose drafts and acceptance a test decides, under the controller `budget`."""

from __future__ import annotations

from collections.abc import Sequence as Many

from fakes import FakeTarget, sequence, table_law
from forerun.controllers.budget import Budget
from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.mixins import Priced
from forerun.core.records import Plan, Sequence, Step, Verdict
from forerun.core.roles import Drafter
from forerun.core.tree import EMPTY, chain

ALL = 10**6  # nodes: no draft is longer


class Free(Priced, Drafter):
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
    for seq in seqs:
        budget.finish(seq)
    return found


def one_step(
    budget: Budget,
    seqs: Many[Sequence],
    accepted: int | Many[int],
    is_known: bool = True,
    longest: int = ALL,
    leads: Many[int] = (),
) -> list[Plan]:
    """A step in which all who may draft do, unless nothing is known of the text.

    accepted: nodes of each draft, at most; of all drafts, or of one per sequence. longest: draft.
    """
    each = [accepted] * len(seqs) if isinstance(accepted, int) else accepted
    plans = [budget.plan(seq) for seq in seqs]
    sizes = [min(plan.nodes, longest) * is_known for plan in plans]
    trees = [chain(range(size)) if size else EMPTY for size in sizes]
    verdicts = [
        Verdict(list(range(min(size, most))), 0) for size, most in zip(sizes, each, strict=True)
    ]
    emitted = [verdict.tokens(tree) for verdict, tree in zip(verdicts, trees, strict=True)]
    budget.observe(Step(seqs, plans, trees, [], verdicts, emitted, leads=leads))
    return plans


def extra(cost: Cost, plans: Many[Plan], is_known: bool = True) -> float:
    """What a step takes beyond one of plain decoding, in those; `is_known` as in `one_step`."""
    num, drafts = len(plans), sum(plan.nodes > 0 for plan in plans)
    rows = num + is_known * sum(plan.nodes for plan in plans)
    overhead = cost.overhead(num, drafts * is_known, drafts * (not is_known))
    return (float(cost.at(rows)) + overhead) / (float(cost.at(num)) + cost.overhead(num, 0)) - 1
