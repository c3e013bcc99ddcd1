"""Several drafters, one tree: equal tokens under one parent are merged, labels stay honest.

A merged token keeps the law of the drafter that came first. A drawn token that is kept beside
earlier siblings is known to differ from them, so its law given their rejection is q without their
tokens: SWOR, whatever it was drawn as. Lossless by that argument and by enumeration (tests/laws).
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

from forerun import registry
from forerun.dice import Dice
from forerun.errors import ConfigError
from forerun.records import Plan, Sequence, Step
from forerun.roles import Drafter, Target
from forerun.tree import IID, SWOR, Proposal, Tree, TreeBuilder


class Fuse(Drafter):
    """`parts` are drafters or their names ("prompt_lookup+stand"); earlier parts draft first.

    The node budget is divided beforehand, in equal shares.
    """

    def __init__(
        self, *, parts: tuple[Any, ...] = ("prompt_lookup", "stand"), tokenizer: Any = None
    ) -> None:
        if isinstance(parts, str) or len(parts) < 2:
            raise ConfigError(f"fuse needs two parts or more, got {parts!r}; write parts=a+b")
        self.parts: list[Drafter] = [
            part
            if isinstance(part, Drafter)
            else registry.make("drafter", part, tokenizer=tokenizer)
            for part in parts
        ]
        self.labels = frozenset({"swor"}).union(*(p.labels - {"iid"} for p in self.parts))
        self.needs = frozenset().union(*(part.needs for part in self.parts))

    def bind(self, target: Target) -> None:
        for part in self.parts:
            part.bind(target)

    def warm_up(self) -> None:
        for part in self.parts:
            part.warm_up()

    def start(self, seq: Sequence) -> None:
        for part in self.parts:
            part.start(seq)

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        return merge(
            [
                part.propose_one(seq, share, dice)
                for part, share in zip(self.parts, self._shares(plan), strict=True)
            ]
        )

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        shares = zip(*(self._shares(plan) for plan in plans), strict=True)
        forests = [part.propose(seqs, list(s)) for part, s in zip(self.parts, shares, strict=True)]
        return [merge(list(trees)) for trees in zip(*forests, strict=True)]

    def observe(self, step: Step) -> None:
        for part in self.parts:
            part.observe(step)

    def finish(self, seq: Sequence) -> None:
        for part in self.parts:
            part.finish(seq)

    def forget(self, group: Hashable) -> None:
        for part in self.parts:
            part.forget(group)

    def memory_report(self) -> dict[str, int]:
        return {
            f"part {i}: {name}": size
            for i, part in enumerate(self.parts)
            for name, size in part.memory_report().items()
        }

    def _shares(self, plan: Plan) -> list[Plan]:
        count = len(self.parts)
        return [replace(plan, nodes=(plan.nodes + i) // count) for i in reversed(range(count))]


def merge(trees: list[Tree]) -> Tree:
    """One tree that holds all paths of the given ones, earlier trees first."""
    out = TreeBuilder()
    for tree in trees:
        where, laws = {-1: -1}, {int(row): tree.q(n) for n, row in enumerate(tree.rows)}
        for node in range(len(tree)):
            parent, token = where[int(tree.parents[node])], int(tree.tokens[node])
            same = [c for c in out.children(parent) if out.tokens[c] == token]
            where[node] = same[0] if same else _copy(out, tree, node, parent, laws)
    return out.build()


def _copy(
    out: TreeBuilder, tree: Tree, node: int, parent: int, laws: dict[int, Proposal | None]
) -> int:
    law, q = int(tree.laws[node]), laws.get(int(tree.rows[node]))
    return out.add(int(tree.tokens[node]), parent, SWOR if law == IID else law, q)
