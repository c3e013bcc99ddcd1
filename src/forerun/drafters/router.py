"""Learns which drafter pays for a sequence: the one whose drafts buy most tokens for their rows.

Every LOOK steps all parts draft. A tree of chosen tokens is scored by how far the text has followed
it when the next comparison begins, whether or not it was used; one of drawn tokens is fairly scored
by use alone, so the second best part is tried at every EXPLORE-th
comparison. In between only the best one drafts. A score is tokens per second: 1 + accepted nodes
over the seconds of a pass over its rows (`engine/cost.py`) and of drafting; recent steps weigh
more, and a new sequence begins with what others of its prompt have taught.

Law: the choice rests on earlier steps alone, so labels stay true. Needs: what its parts need.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
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

LOOK, EXPLORE = 6, 12  # steps between two comparisons, comparisons between two trials
KEEP, KEEP_ALL = 0.95, 0.99  # memory of a sequence's and of all sequences' comparisons
MARGIN = 1.15  # by which a later part must be better than the first: scores are noisy


@dataclass
class Comparison:
    """What all parts drafted at one place of a text; scored when the next one begins."""

    start: int  # tokens before it
    used: int
    trees: list[Tree]
    accepted: int | None = None  # nodes of the used tree; None until it was judged

    def scores(self, seq: Sequence) -> dict[int, int]:
        """Accepted nodes by part: of the used tree, and of those whose tokens were chosen.

        How far the text follows a chosen path shows later; where it has not ended yet, so far.
        """
        assert self.accepted is not None, "nothing is scored before it was judged"
        after = seq.tokens[self.start :]
        others = (k for k, tree in enumerate(self.trees) if (tree.laws == POINT).all())
        return {k: followed(self.trees[k], after)[0] for k in others} | {self.used: self.accepted}


@dataclass
class Contest:
    """How the parts fare on one sequence."""

    turn: int = -1
    known: np.ndarray | None = None  # mean tokens and seconds [2, parts]
    ranking: list[int] = field(default_factory=list)  # by `known`; empty as long as that is None
    compared: Comparison | None = None


class Router(Composite):
    """`parts` compete for every sequence; the first one is used where they are about as good.

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
        used, compares = self._turn(seq)
        if not compares:
            return self._signed(used, self.parts[used].propose_one(seq, plan, dice))
        trees = [part.propose_one(seq, plan, dice) for part in self.parts]
        return self._use(seq, used, trees)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        turns = [self._turn(seq) for seq in seqs]
        found: list[list[Tree]] = [[] for _ in seqs]
        for k, part in enumerate(self.parts):
            asked = [i for i, (used, compares) in enumerate(turns) if compares or used == k]
            if not asked:
                continue
            trees = part.propose([seqs[i] for i in asked], [plans[i] for i in asked])
            for i, tree in zip(asked, trees, strict=True):
                found[i].append(tree)
        return [
            self._use(seq, used, trees) if compares else self._signed(used, trees[0])
            for seq, (used, compares), trees in zip(seqs, turns, found, strict=True)
        ]

    def observe(self, step: Step) -> None:
        for seq, verdict in zip(step.seqs, step.verdicts, strict=True):
            contest = self._own.get(seq)
            if contest and contest.compared and contest.compared.accepted is None:
                contest.compared.accepted = len(verdict.nodes)
        super().observe(step)

    def finish(self, seq: Sequence) -> None:
        self._settle(seq)
        self._own.pop(seq, None)
        self._all.pop(seq, None)  # where nobody shares it
        super().finish(seq)

    def forget(self, group: Hashable) -> None:
        self._all.pop(group, None)
        super().forget(group)

    def scores(self, seq: Sequence) -> dict[str, float]:
        """Tokens per second of every part, as far as is known of this sequence."""
        tokens, seconds = self._known(seq)
        return dict(zip(self.names, (tokens / seconds).tolist(), strict=True))

    def _turn(self, seq: Sequence) -> tuple[int, bool]:
        """Whose tree is used in this step, and whether all parts draft."""
        contest = self._own.setdefault(seq, Contest())
        contest.turn += 1
        explores = contest.turn % (LOOK * EXPLORE) == LOOK * (EXPLORE - 1)
        return self._ranking(seq)[explores], contest.turn % LOOK == 0

    def _use(self, seq: Sequence, used: int, trees: list[Tree]) -> Tree:
        self._settle(seq)
        self._own[seq].compared = Comparison(len(seq.tokens), used, trees)
        return self._signed(used, trees[used])

    def _signed(self, used: int, tree: Tree) -> Tree:
        return signed(tree, name_of(self.parts[used]))

    def _ranking(self, seq: Sequence) -> list[int]:
        """Parts by falling score; ties go to the earlier one, and nearly so to the first."""
        contest = self._own.get(seq)
        return (contest and contest.ranking) or _ranked(self._known(seq))

    def _known(self, seq: Sequence) -> np.ndarray:
        """Mean tokens and seconds [2, parts] of this sequence, or of others that share them."""
        contest = self._own.get(seq)
        if contest is not None and contest.known is not None:
            return contest.known
        if (known := self._all.get(key_of(self.scope, seq))) is None:
            known = np.ones((2, len(self.parts)))
            known[1] = self._cost.at(1)
        return known

    def _settle(self, seq: Sequence) -> None:
        """Learns from the last comparison what the text has shown of it."""
        contest = self._own.get(seq)
        found = contest and contest.compared
        if contest is None or not found:
            return
        contest.compared = None
        if found.accepted is not None and any(map(len, found.trees)):
            self._learn(seq, contest, found)

    def _learn(self, seq: Sequence, contest: Contest, found: Comparison) -> None:
        rows = np.array([len(tree) for tree in found.trees])
        drafting = [part.seconds(n) for part, n in zip(self.parts, rows.tolist(), strict=True)]
        seconds = self._cost.at(1 + rows) + drafting
        new = np.full((2, len(rows)), np.nan)  # of parts that cannot be scored in this step
        for k, count in found.scores(seq).items():
            new[:, k] = 1 + count, seconds[k]
        key = key_of(self.scope, seq)
        before, theirs = self._known(seq), self._all.get(key)
        contest.known = _mean(before, new, KEEP)
        contest.ranking = _ranked(contest.known)
        self._all[key] = _mean(before if theirs is None else theirs, new, KEEP_ALL)


def _ranked(known: np.ndarray) -> list[int]:
    scores = known[0] / known[1]
    scores[0] *= MARGIN
    return np.argsort(-scores, kind="stable").tolist()


def _mean(old: np.ndarray, new: np.ndarray, keep: float) -> np.ndarray:
    return np.where(np.isnan(new), old, keep * old + (1 - keep) * new)
