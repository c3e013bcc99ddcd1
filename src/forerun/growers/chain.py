"""A chain of draft tokens, each drawn from q.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
"""

from __future__ import annotations

from forerun.core.dice import Dice
from forerun.core.growing import Grower, Growth
from forerun.core.records import Plan
from forerun.core.tree import IID, TreeBuilder


class Chain(Grower):
    """A chain of sampled tokens; ends after a token for which `plan.stop` is true.

    It also ends before a token with an estimated acceptance probability below
    `plan.min_acceptance`. The estimate is the product of the largest probability of each q on the
    path. It is known before the token is drawn, so the draft stays exact.
    """

    labels = frozenset({"iid"})

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, node, reach = TreeBuilder(), -1, 1.0
        while len(tree) < min(plan.depth, plan.nodes):
            (q,) = yield [tuple(tree.path(node))]
            if q is None:
                break
            reach *= float(q.probs.max())
            if reach < plan.min_acceptance:
                break
            token = int(q.ids[dice.choice(q.probs)])
            node = tree.add(token, node, IID, q)
            if plan.stop(q, token):
                break
        return tree.build()
