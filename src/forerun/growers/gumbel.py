"""Children drawn without replacement in one go by Gumbel-Top-k, on a fixed template (STAND, RSD-C).

Kool et al., "Stochastic Beams and Where to Find Them", 2019: perturbed log-probabilities, sorted,
are sequential draws without replacement. The i-th draw fills the template's child of rank i, so a
child exists or not by its rank alone and never by its token: exact.
"""

from __future__ import annotations

from forerun.dice import Dice
from forerun.records import Plan
from forerun.roles import Grower, Growth
from forerun.template import DEFAULT, Template, levels
from forerun.tree import SWOR, TreeBuilder


class Gumbel(Grower):
    """Fills the first `plan.nodes` places of the template with draws without replacement."""

    labels = frozenset({"swor"})

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
                drawn = dice.without_replacement(q.probs, len(kids))
                for kid, i in zip(kids, drawn, strict=False):
                    where[kid] = tree.add(int(q.ids[i]), where[parent], SWOR, q)
        return tree.build()
