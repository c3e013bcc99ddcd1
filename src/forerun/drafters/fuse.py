"""Merges the trees of several drafters: equal tokens under one parent become one node.

A merged node keeps the label of the first drafter. A drawn node that is kept next to earlier
siblings differs from them, so its distribution given their rejection is q without their tokens:
label SWOR, independent of how it was drawn. Exact by this argument and by enumeration (tests/laws).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from forerun.core.dice import Dice
from forerun.core.mixins import priced
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Drafter, Target
from forerun.core.tree import NO_Q, POINT, Tree
from forerun.drafters.base import Composite, refuse_lazy
from forerun.growers._merge import copy_laws, overlay, warm_up
from forerun.registry import DrafterName

NO_CELLS = np.empty(0, np.int8)


class Fuse(Composite):
    """`parts` are drafters or their names ("prompt_lookup+stand"); earlier parts draft first.

    Each part gets an equal share of the node budget, and what earlier parts left of theirs.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] = ("prompt_lookup", "stand"),
        tokenizer: Any = None,
    ) -> None:
        super().__init__(parts, tokenizer)
        refuse_lazy("fuse", self.parts)
        self.labels = frozenset({"swor"}).union(*(p.labels - {"iid"} for p in self.parts))

    def bind(self, target: Target) -> None:
        super().bind(target)
        warm_up()

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        share = -(-nodes // len(self.parts))
        return sum(priced(part).draft_seconds(share, num) for part in self.parts)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        if not seqs:
            return []
        forests: list[list[Tree]] = []
        left = [plan.nodes for plan in plans]
        for i, part in enumerate(self.parts):
            num = len(self.parts) - i
            shares = [plan.sized(-(-k // num)) for plan, k in zip(plans, left, strict=True)]
            forests.append(part.propose(seqs, shares, dice))
            left = [k - len(tree) for k, tree in zip(left, forests[-1], strict=True)]
        return [merge(list(trees), self.names) for trees in zip(*forests, strict=True)]


def merge(trees: list[Tree], names: Many[str] = ()) -> Tree:
    """One tree with all paths of the given trees, earlier trees first.

    names: of the drafters; `Tree.sources` gets the first that drafted a node. Trees with LAZY
    nodes are left out if there are others.
    """
    max_size, size = sum(map(len, trees)), 0
    tokens, parents, origins, rows = np.empty((4, max_size), np.int32)
    laws, cells = np.empty((2, max_size), np.int8)
    rows.fill(-1)
    laws.fill(POINT)
    cells.fill(-1)
    sources: tuple[str, ...] = ()
    drawn: list[Tree] = []  # those with proposals
    num_laws = 0
    for i, tree in enumerate(trees):
        if tree.lazy and len(trees) > 1:
            continue
        start = size
        size = overlay(tokens, parents, size, max_size, tree.tokens, tree.parents, origins)
        if size == start:
            continue
        if names:
            sources += _sources(tree, origins[start:size], names[i])
        if len(tree.starts) > 1 or tree.cells is not None:
            valued = tree.cells if tree.cells is not None else NO_CELLS
            own = tree.laws, tree.rows, valued
            copy_laws(laws, rows, cells, origins, start, size, own, num_laws)
        if len(tree.starts) > 1:
            drawn.append(tree)
            num_laws += len(tree.starts) - 1
    starts, q_ids, q_probs = _proposals(drawn)
    return Tree(
        tokens=tokens[:size],
        parents=parents[:size],
        laws=laws[:size],
        rows=rows[:size],
        starts=starts,
        q_ids=q_ids,
        q_probs=q_probs,
        cells=cells[:size],
        sources=sources,
    )


def _sources(tree: Tree, kept: np.ndarray, name: str) -> tuple[str, ...]:
    """The drafters of the nodes `kept` of a tree by drafter `name`."""
    if not tree.sources:
        return (name,) * len(kept)
    return tuple(tree.sources[node] for node in kept.tolist())


def _proposals(trees: list[Tree]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenated `starts`, `q_ids` and `q_probs` of several trees."""
    if not trees:
        return NO_Q
    if len(trees) == 1:
        return trees[0].starts, trees[0].q_ids, trees[0].q_probs
    firsts = np.cumsum([0, *(len(tree.q_ids) for tree in trees)]).tolist()
    starts = [tree.starts[1:] + first for tree, first in zip(trees, firsts, strict=False)]
    return (
        np.concatenate([NO_Q[0], *starts]),
        np.concatenate([tree.q_ids for tree in trees]),
        np.concatenate([tree.q_probs for tree in trees]),
    )
