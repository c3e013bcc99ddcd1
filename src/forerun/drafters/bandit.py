"""One of several drafters at a time: whichever makes the most tokens per second here.

Parts of any kind may compete, those that draw too, so nothing but use tells how a part fares. A
sequence drafts some steps with one part, then chooses anew: a part that was hardly tried, else the
fastest, but at every EXPLORE-th choice another one. A part's speed is the tokens of its steps over
their seconds (`engine/cost.py`), as if all that decode at once drafted with it; recent steps weigh
more, since memories grow.

Law: the choice rests on earlier steps alone, so labels stay true. Needs: what its parts need.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from forerun.dice import Dice
from forerun.drafters.base import Composite
from forerun.engine.cost import cost_of
from forerun.errors import ConfigError
from forerun.ngrams.sharing import check_scope, key_of
from forerun.records import Cost, Plan, Sequence, Step
from forerun.registry import DrafterName
from forerun.roles import Drafter, Target, name_of
from forerun.tree import EMPTY, Tree, signed

EXPLORE = 16  # choices of which one is a trial
KEEP = 0.998  # memory of a part's steps


class Record:
    """How the parts have fared, on all sequences that share it."""

    def __init__(self, parts: int) -> None:
        self.runs = np.zeros(parts, dtype=np.int64)
        self.tokens, self.seconds = np.zeros(parts), np.zeros(parts)  # decayed sums

    def choose(self, trials: int) -> int:
        """The part of the next run, once each has had so many."""
        speeds = self.speeds()
        best = int(np.argmax(speeds))
        if self.runs.min() < trials:
            best = int(np.argmin(self.runs))
        elif self.runs.sum() % EXPLORE == 0:
            speeds[best] = -1.0
            best = int(np.argmax(speeds))
        self.runs[best] += 1
        return best

    def speeds(self) -> np.ndarray:
        """Tokens per second of every part; 0 of those that were never used."""
        return self.tokens / np.maximum(self.seconds, 1e-9)

    def add(self, part: int, tokens: int, seconds: float) -> None:
        self.tokens[part] = KEEP * self.tokens[part] + tokens
        self.seconds[part] = KEEP * self.seconds[part] + seconds


@dataclass
class Turn:
    """Which part drafts for a sequence, for how many steps, and what it said in this one."""

    part: int = 0
    left: int = 0
    tree: Tree | None = None


class Bandit(Composite):
    """Lets `parts` compete; of those that nothing is known of the first one drafts.

    scope: which sequences share what is known, as `Router`'s. run: steps with one part. trials:
    runs that each part gets at first. Raises ConfigError for fewer than one of either.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...],
        scope: str = "group",
        run: int = 8,
        trials: int = 2,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(parts, tokenizer)
        check_scope(scope)
        if run < 1 or trials < 1:
            raise ConfigError(f"run and trials must be at least 1, got {run=} and {trials=}")
        self.scope, self.run, self.trials = scope, run, trials
        self._cost = Cost((1, 2), (1.0, 1.0))
        self._records: dict[Hashable, Record] = {}
        self._turns: WeakKeyDictionary[Sequence, Turn] = WeakKeyDictionary()

    def bind(self, target: Target) -> None:
        super().bind(target)
        self._cost = cost_of(target)

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        turn = self._turn(seq)
        part = self.parts[turn.part]
        turn.tree = signed(part.propose_one(seq, plan, dice), name_of(part))
        return turn.tree

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        turns = [self._turn(seq) for seq in seqs]
        trees = [EMPTY] * len(seqs)
        for k, (part, name) in enumerate(zip(self.parts, self.names, strict=True)):
            if not (asked := [i for i, turn in enumerate(turns) if turn.part == k]):
                continue
            found = part.propose([seqs[i] for i in asked], [plans[i] for i in asked])
            for i, tree in zip(asked, found, strict=True):
                trees[i] = turns[i].tree = signed(tree, name)
        return trees

    def observe(self, step: Step) -> None:
        num = len(step.seqs)
        for seq, tree, emitted in zip(step.seqs, step.trees, step.emitted, strict=True):
            turn = self._turns.get(seq)
            if turn and turn.tree is tree:  # else it was not asked, or another one was used
                spent = self._spent(turn.part, len(tree), num)
                self._record(seq).add(turn.part, len(emitted), spent)
            if turn:
                turn.tree = None
        super().observe(step)

    def finish(self, seq: Sequence) -> None:
        self._turns.pop(seq, None)
        self._records.pop(seq, None)  # where nobody shares it
        super().finish(seq)

    def forget(self, group: Hashable) -> None:
        self._records.pop(group, None)
        super().forget(group)

    def speeds(self, seq: Sequence) -> dict[str, float]:
        """Tokens per second by part, as far as is known; 0 where a part was not used yet."""
        return dict(zip(self.names, self._record(seq).speeds().tolist(), strict=True))

    def _record(self, seq: Sequence) -> Record:
        return self._records.setdefault(key_of(self.scope, seq), Record(len(self.parts)))

    def _turn(self, seq: Sequence) -> Turn:
        turn = self._turns.setdefault(seq, Turn())
        if not turn.left:
            turn.part, turn.left = self._record(seq).choose(self.trials), self.run
        turn.left -= 1
        return turn

    def _spent(self, part: int, nodes: int, num: int) -> float:
        """Seconds of a sequence's share in a step in which all draft so many nodes."""
        whole = float(self._cost.at(num * (1 + nodes))) + self._cost.aside(num, num)
        return whole / num + self.parts[part].seconds(nodes, num)
