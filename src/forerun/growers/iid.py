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
        tree = TreeBuilder()
        depth = min(plan.depth, plan.nodes // self.width)
        ends = [-1] * self.width
        for _ in range(depth):
            qs = yield [tuple(tree.path(node)) for node in dict.fromkeys(ends)]
            known = dict(zip(dict.fromkeys(ends), qs, strict=True))
            ends = [(node, known[node]) for node in ends if known[node] is not None]
            ends = [tree.add(int(q.ids[dice.choice(q.probs)]), node, IID, q) for node, q in ends]
            if not ends:
                break
        return tree.build()
