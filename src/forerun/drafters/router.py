"""Learns where another drafter pays more than the first one, which drafts everywhere else.

A part that copies is worth most where it has much to say: where its tree is long. Every LOOK-th
step all parts draft, more rarely where no tree is long, and each part with a long tree is scored
against the first at such places alone: by tokens per second, 1 + accepted nodes over the seconds of
a pass over its rows (`engine/cost.py`) and of drafting. A tree of chosen tokens is scored by how
far the text has followed it when all draft again, whether or not it was used; one of drawn tokens
is fairly scored by use alone, so at every EXPLORE-th comparison the other one is used. Whoever is
clearly better drafts until its tree is short, or it no longer is. Recent comparisons weigh more,
and a new sequence begins with what others of its prompt have taught.

Law: the choice rests on earlier steps and on trees of chosen tokens, so labels stay true: a tree of
drawn tokens counts as long whatever its size. Needs: what its parts need.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from forerun.dice import Dice
from forerun.drafters.base import Composite, followed
from forerun.engine.cost import cost_of
from forerun.ngrams.sharing import check_scope, key_of
from forerun.records import Cost, Plan, Sequence, Step
from forerun.registry import DrafterName
from forerun.roles import Drafter, Target, name_of
from forerun.tree import POINT, Tree, signed

LOOK, REST, EXPLORE = 6, 24, 12  # steps between two looks, at most; comparisons between two trials
LONG = 2 / 3  # of the longest path that the plan allows: nodes of a tree that has much to say
KEEP, KEEP_ALL = 0.95, 0.99  # memory of a sequence's and of all sequences' comparisons
MARGIN = 1.15  # by which another part must be better than the first: scores are noisy


@dataclass
class Comparison:
    """What the first part and those with long trees drafted at one place of a text."""

    start: int  # tokens before it
    used: int
    trees: dict[int, Tree]  # by part
    accepted: int | None = None  # nodes of the used tree; None until it was judged

    def scores(self, seq: Sequence) -> dict[int, int]:
        """Accepted nodes by part: of the used tree, and of those whose tokens were chosen.

        How far the text follows a chosen path shows later; where it has not ended yet, so far.
        """
        assert self.accepted is not None, "nothing is scored before it was judged"
        after = seq.tokens[self.start :]
        chosen = (k for k, tree in self.trees.items() if (tree.laws == POINT).all())
        return {k: followed(self.trees[k], after)[0] for k in chosen} | {self.used: self.accepted}


@dataclass
class Contest:
    """How the parts fare on one sequence."""

    left: int = 0  # steps until all parts draft
    pause: int = LOOK // 2  # steps between the last two times they did
    num_compared: int = 0
    leader: int = 0  # who drafts in between
    known: np.ndarray | None = None  # means of this sequence, as `Router._known` gives them
    compared: Comparison | None = None  # until the next one begins

    @property
    def compares(self) -> bool:
        """Whether all parts draft in this step."""
        return self.left == 0

    def looked(self, has_long: bool) -> bool:
        """All have drafted; whether what seems worse is used this time."""
        self.pause = LOOK if has_long else min(2 * self.pause, REST)
        self.left = self.pause
        self.num_compared += has_long
        return has_long and self.num_compared % EXPLORE == 0


class Router(Composite):
    """The first of `parts` drafts, the others where they have much to say and are better there.

    scope: which sequences share what is known of the parts: "request" (none), "group" (samples of
    one prompt: a call with the same seed drafts the same again), "tenant" or "global".
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] = ("stand", "suffix"),
        scope: str = "group",
        tokenizer: Any = None,
    ) -> None:
        super().__init__(parts, tokenizer)
        check_scope(scope)
        self.scope = scope
        self._cost = Cost((1, 2), (1.0, 1.0))
        self._all: dict[Hashable, np.ndarray] = {}  # by scope: tokens and seconds of the parts
        self._own: WeakKeyDictionary[Sequence, Contest] = WeakKeyDictionary()

    def bind(self, target: Target) -> None:
        super().bind(target)
        self._cost = cost_of(target)

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        contest, found = self._turn(seq), dict[int, Tree]()
        for k in reversed(range(len(self.parts))):
            if self._is_asked(k, contest, found, plan):
                found[k] = self.parts[k].propose_one(seq, plan, dice)
        return self._use(seq, contest, found, plan)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        turns = [(self._turn(seq), dict[int, Tree]()) for seq in seqs]
        for k in reversed(range(len(self.parts))):
            asked = [
                i
                for i, (turn, plan) in enumerate(zip(turns, plans, strict=True))
                if self._is_asked(k, *turn, plan)
            ]
            if not asked:
                continue
            trees = self.parts[k].propose([seqs[i] for i in asked], [plans[i] for i in asked])
            for i, tree in zip(asked, trees, strict=True):
                turns[i][1][k] = tree
        return [
            self._use(seq, *turn, plan) for seq, turn, plan in zip(seqs, turns, plans, strict=True)
        ]

    def observe(self, step: Step) -> None:
        for seq, verdict in zip(step.seqs, step.verdicts, strict=True):
            contest = self._own.get(seq)
            if contest and contest.compared and contest.compared.accepted is None:
                contest.compared.accepted = len(verdict.nodes)
        super().observe(step)

    def finish(self, seq: Sequence) -> None:
        if contest := self._own.get(seq):
            self._settle(seq, contest)
        self._own.pop(seq, None)
        self._all.pop(seq, None)  # where nobody shares it
        super().finish(seq)

    def forget(self, group: Hashable) -> None:
        self._all.pop(group, None)
        super().forget(group)

    def scores(self, seq: Sequence) -> dict[str, float]:
        """Tokens per second of every part over those of the first, where its trees are long."""
        return dict(zip(self.names, _ratios(self._known(seq)), strict=True))

    def _turn(self, seq: Sequence) -> Contest:
        contest = self._own.setdefault(seq, Contest())
        contest.left = max(contest.left - 1, 0)
        return contest

    def _is_asked(self, k: int, contest: Contest, found: dict[int, Tree], plan: Plan) -> bool:
        """Whether a part drafts in this step, once all later parts have: the first one comes last.

        It does unless the leader's tree is long.
        """
        if contest.compares or contest.leader == k:
            return True
        return not k and not self._is_long(contest.leader, found[contest.leader], plan)

    def _is_long(self, k: int, tree: Tree, plan: Plan) -> bool:
        """Whether a part has much to say; what it drew must not count."""
        if not self.parts[k].labels <= {"point"}:
            return len(tree) > 0  # nothing is known there, whatever would be drawn
        return len(tree) >= max(1.0, LONG * min(plan.nodes, plan.depth))

    def _use(self, seq: Sequence, contest: Contest, found: dict[int, Tree], plan: Plan) -> Tree:
        """The tree that is used, of those found."""
        long = [k for k in sorted(found) if k and self._is_long(k, found[k], plan)]
        used = long[0] if long else 0
        if contest.compares:
            self._settle(seq, contest)
            ratios = _ratios(self._known(seq))
            used = max([0, *long], key=lambda k: ratios[k] / (MARGIN if k else 1.0))
            contest.leader = used
            if contest.looked(bool(long)):
                used = 0 if used else max(long, key=ratios.__getitem__)
            if long:
                trees = {k: found[k] for k in (0, *long)}
                contest.compared = Comparison(len(seq.tokens), used, trees)
        elif not used:
            contest.leader = 0
        return signed(found[used], name_of(self.parts[used]))

    def _known(self, seq: Sequence) -> np.ndarray:
        """Means where a part's trees are long, of this sequence or of others that share them.

        [2, 2, parts]: tokens and seconds; of the part, and of the first one where it was scored
        beside the part's long trees.
        """
        contest = self._own.get(seq)
        if contest is not None and contest.known is not None:
            return contest.known
        if (known := self._all.get(key_of(self.scope, seq))) is None:
            known = np.ones((2, 2, len(self.parts)))
            known[1] = self._cost.at(1)
        return known

    def _settle(self, seq: Sequence, contest: Contest) -> None:
        """Learns from the last comparison what the text has shown of it."""
        found, contest.compared = contest.compared, None
        if found is None or found.accepted is None:
            return
        new = np.full((2, 2, len(self.parts)), np.nan)  # of parts that cannot be scored here
        others = [k for k in found.trees if k]
        for k, count in found.scores(seq).items():
            rows = len(found.trees[k])
            score = 1 + count, float(self._cost.at(1 + rows)) + self.parts[k].seconds(rows)
            if k:
                new[:, 0, k] = score
            else:
                new[:, 1, others] = np.array(score)[:, None]
        key = key_of(self.scope, seq)
        before, theirs = self._known(seq), self._all.get(key)
        contest.known = _mean(before, new, KEEP)
        self._all[key] = _mean(before if theirs is None else theirs, new, KEEP_ALL)


def _ratios(known: np.ndarray) -> list[float]:
    """Tokens per second of the parts over those of the first, [parts]."""
    speeds = known[0] / known[1]
    return (speeds[0] / speeds[1]).tolist()


def _mean(old: np.ndarray, new: np.ndarray, keep: float) -> np.ndarray:
    return np.where(np.isnan(new), old, keep * old + (1 - keep) * new)
