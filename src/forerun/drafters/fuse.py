"""Several drafters, one tree: equal tokens under one parent are merged, labels stay honest.

A merged token keeps the law of the drafter that came first. A drawn token that is kept beside
earlier siblings is known to differ from them, so its law given their rejection is q without their
tokens: SWOR, whatever it was drawn as. Lossless by that argument and by enumeration (tests/laws).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from forerun.dice import Dice
from forerun.drafters.base import Composite
from forerun.overlay import overlay, warm_up
from forerun.records import Plan, Sequence
from forerun.registry import DrafterName
from forerun.roles import Drafter
from forerun.tree import IID, NO_Q, SWOR, Tree


class Fuse(Composite):
    """`parts` are drafters or their names ("prompt_lookup+stand"); earlier parts draft first.

    The node budget is divided beforehand, in equal shares.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] = ("prompt_lookup", "stand"),
        tokenizer: Any = None,
    ) -> None:
        super().__init__(parts, tokenizer)
        self.labels = frozenset({"swor"}).union(*(p.labels - {"iid"} for p in self.parts))

    def seconds(self, nodes: int, num: int = 1) -> float:
        return sum(part.seconds(-(-nodes // len(self.parts)), num) for part in self.parts)

    def warm_up(self) -> None:
        super().warm_up()
        warm_up()

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
        return [plan.sized((plan.nodes + i) // count) for i in reversed(range(count))]


def merge(trees: list[Tree], names: Many[str] = ()) -> Tree:
    """One tree that holds all paths of the given ones, earlier trees first.

    names: of the drafters, so that every node tells who drafted it first.
    """
    most, size = sum(map(len, trees)), 0
    tokens, parents, origins, rows = (np.empty(most, np.int32) for _ in range(4))
    laws, cells, sources = np.zeros(most, np.int8), np.empty(most, np.int8), list[str]()  # POINT: 0
    rows.fill(-1)
    cells.fill(-1)
    starts, q_ids, q_probs = ([array] for array in NO_Q)
    num_laws = num_entries = 0
    for i, tree in enumerate(trees):
        start, size = size, overlay(tokens, parents, size, most, tree.tokens, tree.parents, origins)
        kept = origins[start:size]
        if names:
            own = [tree.sources[n] for n in kept] if tree.sources else [names[i]] * len(kept)
            sources += own
        if tree.cells is not None:
            cells[start:size] = tree.cells[kept]
        if len(tree.starts) == 1:  # all are chosen
            continue
        laws[start:size], own_rows = tree.laws[kept], tree.rows[kept]
        rows[start:size] = np.where(own_rows >= 0, own_rows + num_laws, -1)
        starts.append(tree.starts[1:] + num_entries)
        q_ids.append(tree.q_ids)
        q_probs.append(tree.q_probs)
        num_laws, num_entries = num_laws + len(tree.starts) - 1, num_entries + len(tree.q_ids)
    laws[laws == IID] = SWOR
    return Tree(
        tokens=tokens[:size],
        parents=parents[:size],
        laws=laws[:size],
        rows=rows[:size],
        starts=np.concatenate(starts),
        q_ids=np.concatenate(q_ids),
        q_probs=np.concatenate(q_probs),
        cells=cells[:size],
        sources=tuple(sources),
    )
