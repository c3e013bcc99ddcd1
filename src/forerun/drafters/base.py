"""What drafters share: a source times a grower is a drafter."""

from __future__ import annotations

from collections.abc import Sequence as Many

from forerun.dice import Dice
from forerun.records import Plan, Sequence
from forerun.roles import Drafter, Grower, Path, Source
from forerun.tree import EMPTY, Proposal, Tree


class Grown(Drafter):
    """Grows every tree of the batch in lockstep, so that the source is asked once per level."""

    def __init__(self, source: Source, grower: Grower) -> None:
        self.source, self.grower = source, grower
        self.labels = grower.labels

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        return grow([seq], [plan], [dice], self.source, self.grower)[0]

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        return grow(seqs, plans, [seq.dice for seq in seqs], self.source, self.grower)


def grow(
    seqs: Many[Sequence], plans: Many[Plan], dices: Many[Dice], source: Source, grower: Grower
) -> list[Tree]:
    """Runs one growth per sequence; the requests of all go to the source together."""
    trees = [EMPTY] * len(seqs)
    growths = {
        i: grower.grow(plan, dice)
        for i, (plan, dice) in enumerate(zip(plans, dices, strict=True))
        if not plan.is_empty
    }
    wants: dict[int, list[Path]] = {}
    answers: dict[int, list[Proposal | None]] = {}
    while growths:
        for i, growth in list(growths.items()):
            try:
                wants[i] = growth.send(answers[i]) if answers else next(growth)
            except StopIteration as end:
                trees[i] = end.value
                del growths[i]
        asked = [(i, path) for i in growths for path in wants[i]]
        known = iter(source.next([(seqs[i], path) for i, path in asked]) if asked else [])
        answers = {i: [next(known) for _ in wants[i]] for i in growths}
    return trees
