"""Independent draws: k chains from one root, kept apart even where they agree (SpecTr, SpecInfer).

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", 2023. Every child is drawn
from q with replacement, so equal siblings stay: merged, they would not be independent draws any
more. What follows equal paths comes from one q, which the source is asked for once.
"""

from __future__ import annotations

from forerun.core.dice import Dice
from forerun.core.records import Plan
from forerun.core.roles import Grower, Growth
from forerun.core.tree import IID, TreeBuilder
from forerun.errors import ConfigError


class Iid(Grower):
    """width: the number of chains; or a tree, as children per node level by level ("2+2+1").

    A level is grown whole or not at all.
    """

    labels = frozenset({"iid"})

    def __init__(self, *, width: int | tuple[int, ...] = 2) -> None:
        counts = (width,) if isinstance(width, int) else width
        if min(counts, default=0) < 1:
            raise ConfigError(f"width must be at least 1 at every level, got {width}")
        self.width = width

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, ends = TreeBuilder(), [-1]
        for count in self._counts(plan):
            if len(tree) + count * len(ends) > plan.nodes:
                break
            paths = {end: tuple(tree.path(end)) for end in ends}
            asked = list(dict.fromkeys(paths.values()))
            qs = yield asked
            known = dict(zip(asked, qs, strict=True))
            ends = [
                tree.add(int(q.ids[dice.choice(q.probs)]), end, IID, q)
                for end in ends
                if (q := known[paths[end]]) is not None
                for _ in range(count)
            ]
            if not ends:
                break
        return tree.build()

    def _counts(self, plan: Plan) -> list[int]:
        """Children per node, level by level."""
        if isinstance(self.width, int):
            return [self.width] + [1] * (plan.depth - 1)
        return list(self.width[: plan.depth])
