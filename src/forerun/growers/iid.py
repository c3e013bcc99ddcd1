"""Independent draws: k chains from one root (SpecTr, SpecInfer).

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", 2023. Every child is drawn
from q with replacement. Equal siblings are not merged: merged they would not be independent draws.
The source is queried once per distinct path.
"""

from __future__ import annotations

from forerun.core.dice import Dice
from forerun.core.growing import Grower, Growth
from forerun.core.records import Plan
from forerun.core.tree import IID, TreeBuilder
from forerun.errors import ConfigError


class Iid(Grower):
    """Draws `width` chains, or a tree with `width` children per node of each level ("2+2+1").

    A level that exceeds the node budget is not grown.
    """

    labels = frozenset({"iid"})

    def __init__(self, *, width: int | tuple[int, ...] = 2) -> None:
        counts = (width,) if isinstance(width, int) else width
        if min(counts, default=0) < 1:
            raise ConfigError(f"width={width} is too small; use at least 1 at every level")
        self.width = width

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, ends = TreeBuilder(), [-1]
        for count in self._counts(plan):
            if len(tree) + count * len(ends) > plan.nodes:
                break
            paths = {end: tuple(tree.path(end)) for end in ends}
            distinct = list(dict.fromkeys(paths.values()))
            qs = yield distinct
            known = dict(zip(distinct, qs, strict=True))
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
