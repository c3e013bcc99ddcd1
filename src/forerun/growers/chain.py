"""One draft token after another, each drawn from q: the chain of the first papers.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
"""

from __future__ import annotations

from forerun.core.dice import Dice
from forerun.core.records import Plan
from forerun.core.roles import Grower, Growth
from forerun.core.tree import IID, TreeBuilder


class Chain(Grower):
    """A chain of sampled tokens; stops after (never before) a token that `plan.stop` doubts.

    It also ends where q says so little that a token would hardly be reached and accepted: the
    largest probability of q is about the chance of a token that is drawn from it (embedded draft
    and reasoner, training problems: where it is .20, .52, .71, .86, .94, .99, tokens were accepted
    .17, .44, .62, .78, .88, .99 at temperature 0.6, and .30, .56, .74, .86, .89, .99 at 1). That is
    known before the token is drawn, so the draft stays exact.
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
