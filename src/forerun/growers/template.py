"""Children are the most likely tokens, their number fixed beforehand by a ranked template.

Token Recycling and STAND's deterministic variant use this form; see `forerun.template`.
"""

from __future__ import annotations

import numpy as np

from forerun.dice import Dice
from forerun.records import Plan
from forerun.roles import Grower, Growth
from forerun.template import DEFAULT, Template, levels
from forerun.tree import POINT, TreeBuilder


class TopTemplate(Grower):
    """Fills the first `plan.nodes` places of the template with the top tokens of each q."""

    labels = frozenset({"point"})

    def __init__(self, *, template: Template = DEFAULT) -> None:
        self.template = template

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree = TreeBuilder()
        where = {-1: -1}  # template node -> tree node
        for places in levels(self.template.first(plan.nodes), plan.depth):
            places = {parent: kids for parent, kids in places.items() if parent in where}
            if not places:
                break
            qs = yield [tuple(tree.path(where[parent])) for parent in places]
            for (parent, kids), q in zip(places.items(), qs, strict=True):
                if q is None:
                    continue
                best = np.lexsort((q.ids, -q.probs))
                for kid, i in zip(kids, best, strict=False):
                    where[kid] = tree.add(int(q.ids[i]), where[parent], POINT)
        return tree.build()
