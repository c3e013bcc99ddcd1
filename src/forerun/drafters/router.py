"""Learns which drafter pays for a sequence: the one whose drafts buy most tokens for their rows.

Every LOOK steps all parts draft. A tree of chosen tokens is scored by how far the text follows it,
whether or not it was used (where a longer path may yet come true, that is waited for); one of drawn
tokens is fairly scored by use alone, so the second best part is tried at every EXPLORE-th
comparison. In between only the best one drafts. A score is tokens per second: 1 + accepted nodes
over the seconds of a pass over its rows (`engine/cost.py`) and of drafting; recent steps weigh
more, and a new sequence begins with what the others of its tenant have taught.

Law: the choice rests on earlier steps alone, so labels stay true. Needs: what its parts need.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from forerun.dice import Dice
from forerun.drafters.base import Composite, followed
from forerun.engine.cost import cost_of
from forerun.records import Cost, Plan, Sequence, Step
from forerun.roles import Target, name_of
from forerun.tree import POINT, Tree, signed

LOOK, EXPLORE = 6, 12  # steps between two comparisons, comparisons between two trials
KEEP, KEEP_ALL = 0.95, 0.99  # memory of a sequence's and of all sequences' comparisons
MARGIN = 1.15  # by which a later part must be better than the first: scores are noisy


@dataclass
class Comparison:
    """What all parts drafted at one place of a text; scored when the text has shown enough."""

    start: int  # tokens before it
    used: int
    trees: list[Tree]
    accepted: int | None = None  # nodes of the used tree; None until it was judged

    @property
    def others(self) -> list[int]:
        """Trees that were not used and whose tokens were chosen."""
        all_chosen = ((tree.laws == POINT).all() for tree in self.trees)
        return [k for k, chosen in enumerate(all_chosen) if chosen and k != self.used]

    def followed(self, k: int, seq: Sequence) -> tuple[int, bool]:
        """How far the text follows tree k, and whether that is final."""
        return followed(self.trees[k], seq.tokens[self.start :])

    def is_final(self, seq: Sequence) -> bool:
        return all(self.followed(k, seq)[1] for k in self.others)


class Router(Composite):
    """`parts` compete for every sequence; the first one is used where they are about as good."""

    def __init__(self, *, parts: tuple[Any, ...] = ("stand", "suffix"), tokenizer: Any = None):
        super().__init__(parts, tokenizer)
        self._cost = Cost((1, 2), (1.0, 1.0))
        self._all: dict[str, np.ndarray] = {}  # by tenant: tokens and seconds of the parts
        self._own: WeakKeyDictionary[Sequence, np.ndarray] = WeakKeyDictionary()
        self._turns: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._compared: WeakKeyDictionary[Sequence, Comparison] = WeakKeyDictionary()

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
            trees = part.propose([seqs[i] for i in asked], [plans[i] for i in asked])
            for i, tree in zip(asked, trees, strict=True):
                found[i].append(tree)
        return [
            self._use(seq, used, trees) if compares else self._signed(used, trees[0])
            for seq, (used, compares), trees in zip(seqs, turns, found, strict=True)
        ]

    def observe(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            found = self._compared.get(seq)
            if found is not None:
                if found.accepted is None:
                    found.accepted = len(step.verdicts[i].nodes)
                if found.is_final(seq):
                    self._settle(seq)
        super().observe(step)

    def finish(self, seq: Sequence) -> None:
        self._settle(seq)
        self._own.pop(seq, None)
        self._turns.pop(seq, None)
        super().finish(seq)

    def scores(self, seq: Sequence) -> dict[str, float]:
        """Tokens per second of every part, as far as is known of this sequence."""
        tokens, seconds = self._known(seq)
        return dict(zip(self.names, (tokens / seconds).tolist(), strict=True))

    def _turn(self, seq: Sequence) -> tuple[int, bool]:
        """Whose tree is used in this step, and whether all parts draft."""
        self._turns[seq] = turn = self._turns.get(seq, -1) + 1
        explores = turn % (LOOK * EXPLORE) == LOOK * (EXPLORE - 1)
        return self._ranking(seq)[explores], turn % LOOK == 0

    def _use(self, seq: Sequence, used: int, trees: list[Tree]) -> Tree:
        self._settle(seq)
        self._compared[seq] = Comparison(len(seq.tokens), used, trees)
        return self._signed(used, trees[used])

    def _signed(self, used: int, tree: Tree) -> Tree:
        return signed(tree, name_of(self.parts[used]))

    def _ranking(self, seq: Sequence) -> list[int]:
        """Parts by falling score; ties go to the earlier one, and nearly so to the first."""
        tokens, seconds = self._known(seq)
        scores = tokens / seconds
        scores[0] *= MARGIN
        return np.argsort(-scores, kind="stable").tolist()

    def _known(self, seq: Sequence) -> np.ndarray:
        """Mean tokens and seconds [2, parts] of this sequence, or of its tenant's others."""
        known = self._own.get(seq)
        if known is None:
            known = self._all.get(seq.tenant)
        if known is None:
            known = np.ones((2, len(self.parts)))
            known[1] = self._cost.at(1)
        return known

    def _settle(self, seq: Sequence) -> None:
        """Learns from the last comparison what the text has shown of it."""
        found = self._compared.pop(seq, None)
        if found is not None and found.accepted is not None and any(map(len, found.trees)):
            chosen = {k: found.followed(k, seq)[0] for k in found.others}
            self._learn(seq, found.trees, {found.used: found.accepted} | chosen)

    def _learn(self, seq: Sequence, trees: list[Tree], accepted: dict[int, int]) -> None:
        new = np.full((2, len(trees)), np.nan)  # of parts that cannot be scored in this step
        for k, count in accepted.items():
            rows = len(trees[k])
            new[:, k] = 1 + count, float(self._cost.at(1 + rows)) + self.parts[k].seconds(rows)
        before, theirs = self._known(seq), self._all.get(seq.tenant)
        self._own[seq] = _mean(before, new, KEEP)
        self._all[seq.tenant] = _mean(before if theirs is None else theirs, new, KEEP_ALL)


def _mean(old: np.ndarray, new: np.ndarray, keep: float) -> np.ndarray:
    return np.where(np.isnan(new), old, keep * old + (1 - keep) * new)
