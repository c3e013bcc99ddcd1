"""Grows the tree node by node, most likely accepted place first (as in EAGLE-2).

The value of a place is the product of the rates of `core.acceptance_prior` along its path. It is
known before the token of the place is drawn. Whether a place is filled therefore depends on other
tokens only, and drawn children stay exact: after a rejected sibling the residual distribution is
the same whether or not another child follows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forerun.core.acceptance_prior import NUM_RANKS, AcceptanceCounts, grade
from forerun.core.dice import Dice
from forerun.core.growing import Grower, Growth
from forerun.core.records import Plan
from forerun.core.tree import POINT, SWOR, Proposal, TreeBuilder


class Dynamic(Grower):
    """Grows node by node; ends at plan.nodes nodes or at values of plan.min_acceptance and below.

    drawn: children are drawn without replacement; else they are the most likely tokens. The tree
    records the cell of the acceptance table per node, for `AcceptanceCounts.learn`.
    """

    def __init__(self, *, drawn: bool = True, acceptance: AcceptanceCounts | None = None) -> None:
        self.labels = frozenset({"swor" if drawn else "point"})
        self.drawn, self.acceptance = drawn, acceptance or AcceptanceCounts(drawn=drawn)

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, rates = TreeBuilder(), self.acceptance.rates
        known: dict[int, Proposal] = {}  # node -> q of its children
        orders: dict[int, list[int]] = {}  # node -> entries of q in the order of its children
        left = {-1: 1.0}  # P(node accepted, and none of its children so far)
        value: dict[int, float] = {}  # P(a node's next child is accepted)
        ranks, depths, grades, cells = {-1: 0}, {-1: 0}, dict[int, int](), list[int]()
        node = -1
        while True:
            if depths[node] < plan.depth:
                (q,) = yield [tuple(tree.path(node))]
                if q is not None:
                    known[node] = q
                    grades[node] = grade(q.probs.max(), q.level)
                    value[node] = left[node] * rates[grades[node], 0]
            at = max(value, key=lambda n: value[n], default=None)
            if at is None or len(tree) >= plan.nodes or value[at] <= max(0.0, plan.min_acceptance):
                break
            q = known[at]
            if at not in orders:
                orders[at] = self._order(q, dice)
            law = (SWOR, q) if self.drawn else (POINT, None)
            node = tree.add(int(q.ids[orders[at][ranks[at]]]), at, *law)
            left[node], ranks[node], depths[node] = value[at], 0, depths[at] + 1
            cells.append(grades[at] * NUM_RANKS + min(ranks[at], NUM_RANKS - 1))
            ranks[at] += 1
            left[at] -= value[at]
            value[at] = left[at] * rates[grades[at], min(ranks[at], NUM_RANKS - 1)]
            if ranks[at] == len(q.ids):
                del value[at]
        return replace(tree.build(), cells=np.array(cells, dtype=np.int8))

    def _order(self, q: Proposal, dice: Dice) -> list[int]:
        if self.drawn:
            return dice.without_replacement(q.probs, len(q.probs))
        return np.lexsort((q.ids, -q.probs)).tolist()
