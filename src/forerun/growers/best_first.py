"""The likeliest paths first: each node added is the best one left, by the product of its q.

The tree of at most N nodes with the largest expected accepted length, if q were the target's law.
The source is asked for one path at a time, once per node: right for a table, slow for a model.
"""

from __future__ import annotations

import heapq

from forerun.core.dice import Dice
from forerun.core.records import Plan
from forerun.core.roles import Grower, Growth
from forerun.core.tree import TreeBuilder


class BestFirst(Grower):
    """Adds the path of the largest probability until the plan is full; ties: the first found."""

    labels = frozenset({"point"})

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, depths, found = TreeBuilder(), {-1: 0}, 0
        heap: list[tuple[float, int, int, int]] = []  # -probability, order found, token, parent
        node, worth = -1, 1.0
        while True:
            if depths[node] < plan.depth:
                (q,) = yield [tuple(tree.path(node))]
                for token, p in zip(q.ids, q.probs, strict=True) if q else ():
                    heapq.heappush(heap, (-worth * float(p), found, int(token), node))
                    found += 1
            if not heap or len(tree) >= plan.nodes:
                return tree.build()
            loss, _, token, parent = heapq.heappop(heap)
            node, worth = tree.add(token, parent), -loss
            depths[node] = depths[parent] + 1
