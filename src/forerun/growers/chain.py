"""One draft token after another, each drawn from q: the chain of the first papers.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
"""

from __future__ import annotations

from forerun.dice import Dice
from forerun.records import Plan
from forerun.roles import Grower, Growth
from forerun.tree import IID, TreeBuilder


class Chain(Grower):
    """A chain of sampled tokens; stops after (never before) a token that `plan.stop` doubts."""

    labels = frozenset({"iid"})

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, node = TreeBuilder(), -1
        while len(tree) < min(plan.depth, plan.nodes):
            (q,) = yield [tuple(tree.path(node))]
            if q is None:
                break
            token = int(q.ids[dice.choice(q.probs)])
            node = tree.add(token, node, IID, q)
            if plan.stop(q, token):
                break
        return tree.build()
