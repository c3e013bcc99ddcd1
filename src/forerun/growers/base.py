"""Base class of growers that fill a template level by level."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many

from forerun.core.dice import Dice
from forerun.core.growing import Grower, Growth
from forerun.core.records import Plan
from forerun.core.tree import POINT, Proposal, TreeBuilder
from forerun.core.tree_template import DEFAULT, Template, levels


class Templated(Grower):
    """Fills the first `plan.nodes` places of a template.

    The i-th token of `choose` becomes the child of rank i. Whether a child exists depends on its
    rank, never on its token, so drawn children stay exact.
    """

    law: int  # label of every node

    def __init__(self, *, template: Template = DEFAULT) -> None:
        self.template = template

    @abstractmethod
    def choose(self, q: Proposal, count: int, dice: Dice) -> Many[int]:
        """Up to `count` distinct indices into q, best or first drawn first."""

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree = TreeBuilder()
        where = {-1: -1}  # place -> node; a place below a context without q stays empty
        for places in levels(self.template.first(plan.nodes), plan.depth):
            places = {parent: kids for parent, kids in places.items() if parent in where}
            if not places:
                break
            qs = yield [tuple(tree.path(where[parent])) for parent in places]
            for (parent, kids), q in zip(places.items(), qs, strict=True):
                if q is not None:
                    chosen = self.choose(q, len(kids), dice)
                    where.update(zip(kids, self.add(tree, where[parent], q, chosen), strict=False))
        return tree.build()

    def add(self, tree: TreeBuilder, parent: int, q: Proposal, chosen: Many[int]) -> list[int]:
        """Adds the chosen tokens below `parent`; returns their nodes in the same order."""
        drawn_from = None if self.law == POINT else q
        return [tree.add(int(q.ids[i]), parent, self.law, drawn_from) for i in chosen]
