"""k independent chains from one root, kept apart even where they agree (SpecTr, SpecInfer).

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", 2023.
"""

from __future__ import annotations

from forerun.dice import Dice
from forerun.errors import ConfigError
from forerun.records import Plan
from forerun.roles import Grower, Growth
from forerun.tree import IID, TreeBuilder


class Iid(Grower):
    """`width` chains drawn with replacement: duplicates stay, or the draws would not be i.i.d."""

    labels = frozenset({"iid"})

    def __init__(self, *, width: int = 2) -> None:
        if width < 1:
            raise ConfigError(f"width must be at least 1, got {width}")
        self.width = width

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, ends = TreeBuilder(), [-1] * self.width
        for _ in range(min(plan.depth, plan.nodes // self.width)):
            parents = list(dict.fromkeys(ends))  # at first all chains end at the root
            qs = yield [tuple(tree.path(node)) for node in parents]
            known = dict(zip(parents, qs, strict=True))
            ends = [
                tree.add(int(q.ids[dice.choice(q.probs)]), node, IID, q)
                for node in ends
                if (q := known[node]) is not None
            ]
            if not ends:
                break
        return tree.build()
