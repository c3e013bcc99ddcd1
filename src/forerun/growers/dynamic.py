"""Nodes where they pay: the place most likely to be accepted comes next, wherever it is.

A place is valued by the product of `core.acceptance_prior` along its path, which are known before
its token is drawn; so whether a place is filled depends on other tokens, never on its own, and
drawn children stay exact: given an earlier sibling's token and its rejection, what is owed is
the same residual law whether or not another child follows. The form is EAGLE-2's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forerun.core.acceptance_prior import NUM_RANKS, AcceptanceCounts, grade
from forerun.core.dice import Dice
from forerun.core.records import Plan
from forerun.core.roles import Grower, Growth
from forerun.core.tree import POINT, SWOR, Proposal, TreeBuilder


class Dynamic(Grower):
    """Grows node by node; ends at plan.nodes or below a chance of plan.min_acceptance.

    drawn: children without replacement, else the best tokens. The tree tells by which cell of the
    chances each node was valued, for `Chances.learn`.
    """

    def __init__(self, *, drawn: bool = True, chances: AcceptanceCounts | None = None) -> None:
        self.labels = frozenset({"swor" if drawn else "point"})
        self.drawn, self.chances = drawn, chances or AcceptanceCounts(drawn=drawn)

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, rates = TreeBuilder(), self.chances.rates
        known: dict[int, Proposal] = {}  # q below a node
        orders: dict[int, list[int]] = {}  # its entries in the order drawn
        left = {-1: 1.0}  # chance that the node is reached and none of its children was accepted
        value: dict[int, float] = {}  # chance of a node's next child
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
