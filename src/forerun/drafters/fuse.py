"""Several drafters, one tree: equal tokens under one parent are merged, labels stay honest.

A merged token keeps the law of the drafter that came first. A drawn token that is kept beside
earlier siblings is known to differ from them, so its law given their rejection is q without their
tokens: SWOR, whatever it was drawn as. Lossless by that argument and by enumeration (tests/laws).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import numpy as np

from forerun.dice import Dice
from forerun.drafters.base import Composite
from forerun.records import Plan, Sequence
from forerun.tree import IID, SWOR, Proposal, Tree, TreeBuilder


class Fuse(Composite):
    """`parts` are drafters or their names ("prompt_lookup+stand"); earlier parts draft first.

    The node budget is divided beforehand, in equal shares.
    """

    def __init__(
        self, *, parts: tuple[Any, ...] = ("prompt_lookup", "stand"), tokenizer: Any = None
    ) -> None:
        super().__init__(parts, tokenizer)
        self.labels = frozenset({"swor"}).union(*(p.labels - {"iid"} for p in self.parts))

    def seconds(self, nodes: int) -> float:
        return sum(part.seconds(-(-nodes // len(self.parts))) for part in self.parts)

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        shares = zip(self.parts, self._shares(plan), strict=True)
        return merge([part.propose_one(seq, share, dice) for part, share in shares], self.names)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        if not seqs:
            return []
        shares = zip(*(self._shares(plan) for plan in plans), strict=True)
        forests = [part.propose(seqs, list(s)) for part, s in zip(self.parts, shares, strict=True)]
        return [merge(list(trees), self.names) for trees in zip(*forests, strict=True)]

    def _shares(self, plan: Plan) -> list[Plan]:
        count = len(self.parts)
        return [replace(plan, nodes=(plan.nodes + i) // count) for i in reversed(range(count))]


def merge(trees: list[Tree], names: Many[str] = ()) -> Tree:
    """One tree that holds all paths of the given ones, earlier trees first.

    names: of the drafters, so that every node tells who drafted it first.
    """
    out, sources, cells = TreeBuilder(), list[str](), list[int]()
    for i, tree in enumerate(trees):
        where, laws = {-1: -1}, {int(row): tree.q(n) for n, row in enumerate(tree.rows)}
        for node in range(len(tree)):
            parent, token = where[int(tree.parents[node])], int(tree.tokens[node])
            same = [c for c in out.children(parent) if out.tokens[c] == token]
            where[node] = same[0] if same else _copy(out, tree, node, parent, laws)
            if same:
                continue
            cells.append(-1 if tree.cells is None else int(tree.cells[node]))
            if names:
                sources.append(tree.sources[node] if tree.sources else names[i])
    return replace(out.build(), cells=np.array(cells, dtype=np.int8), sources=tuple(sources))


def _copy(
    out: TreeBuilder, tree: Tree, node: int, parent: int, laws: dict[int, Proposal | None]
) -> int:
    law, q = int(tree.laws[node]), laws.get(int(tree.rows[node]))
    return out.add(int(tree.tokens[node]), parent, SWOR if law == IID else law, q)
