"""Grows the tree node by node, most likely path first (path probability: product of q).

If q equals the target distribution, the tree of N nodes has the largest expected accepted length.
The source is queried once per node: fast for a table, slow for a model.
"""

from __future__ import annotations

import heapq

from forerun.core.dice import Dice
from forerun.core.growing import Grower, Growth
from forerun.core.records import Plan
from forerun.core.tree import TreeBuilder


class BestFirst(Grower):
    """Adds the path with the largest probability until the plan is full; ties: first found."""

    labels = frozenset({"point"})

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, depths, found = TreeBuilder(), {-1: 0}, 0
        heap: list[tuple[float, int, int, int]] = []  # -probability, order found, token, parent
        node, prob = -1, 1.0
        while True:
            if depths[node] < plan.depth:
                (q,) = yield [tuple(tree.path(node))]
                for token, p in zip(q.ids, q.probs, strict=True) if q else ():
                    heapq.heappush(heap, (-prob * float(p), found, int(token), node))
                    found += 1
            if not heap or len(tree) >= plan.nodes:
                return tree.build()
            negative, _, token, parent = heapq.heappop(heap)
            node, prob = tree.add(token, parent), -negative
            depths[node] = depths[parent] + 1
