"""The first drafter that has something to say: cheap and sure ones before the others.

Whether a part has a tree hangs on the text and on what it has learned, never on tokens that it
draws, so the choice leaves every label true. Needs: what its parts need.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from forerun.dice import Dice
from forerun.drafters.base import Composite, signed
from forerun.errors import ConfigError
from forerun.records import Plan, Sequence
from forerun.tree import EMPTY, Tree


class Cascade(Composite):
    """`parts` in the order in which they are asked; a tree of fewer than `least` nodes is none."""

    def __init__(
        self,
        *,
        parts: tuple[Any, ...] = ("suffix", "stand"),
        least: int = 2,
        tokenizer: Any = None,
    ) -> None:
        if least < 1:
            raise ConfigError(f"least must be at least 1 node, got {least}")
        super().__init__(parts, tokenizer)
        self.least = least

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        best = EMPTY
        for part, name in zip(self.parts, self.names, strict=True):
            tree = part.propose_one(seq, plan, dice)
            if len(tree) > len(best):
                best = signed(tree, name)
            if len(tree) >= min(self.least, plan.nodes):
                break
        return best

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        trees = [EMPTY] * len(seqs)
        for part, name in zip(self.parts, self.names, strict=True):
            open_ = [
                i for i, p in enumerate(plans) if len(trees[i]) < min(self.least, p.nodes, p.depth)
            ]
            found = part.propose([seqs[i] for i in open_], [plans[i] for i in open_])
            for i, tree in zip(open_, found, strict=True):
                if len(tree) > len(trees[i]):
                    trees[i] = signed(tree, name)
        return trees
