"""One of several drafters at a time: whichever makes the most tokens per second here.

Parts of any kind may compete, those that draw too, so nothing but use tells how a part fares. A
sequence drafts some steps with one part, then chooses anew: the one that may be fastest, since what
was hardly used of late may be faster than it seems (an upper confidence bound). A part's speed is
the tokens of its steps over their seconds (`passes.py`), as if all that share its record and decode
at once drafted with it; one that was hardly used is believed to stand to the others as `beliefs`
say. Recent steps weigh more, since memories grow.

Law: the choice rests on earlier steps alone, so labels stay true. Needs: what its parts need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from forerun.dice import Dice
from forerun.drafters.base import Composite
from forerun.errors import ConfigError
from forerun.ngrams.sharing import check_scope, key_of
from forerun.passes import curve_of
from forerun.records import Cost, Plan, Sequence, Step
from forerun.registry import DrafterName
from forerun.roles import Drafter, Target, name_of
from forerun.tree import EMPTY, Tree, signed

KEEP = 0.998  # memory of steps
WEIGHT = 40.0  # steps that a belief stands for


class Record:
    """How the parts have fared on all sequences that share it; `beliefs`: relative speeds."""

    def __init__(self, beliefs: Many[float]) -> None:
        self.beliefs = np.array(beliefs)
        self.sums = np.zeros((3, len(self.beliefs)))  # decayed: tokens, seconds, runs
        self.tokens, self.seconds, self.runs = self.sums
        self.steps = 0.0

    def choose(self, optimism: float) -> int:
        """The part of the next run."""
        doubt = np.sqrt(np.log1p(self.runs.sum()) / (1 + self.runs))
        hopes = self.speeds() * (1 + optimism * doubt)
        best = int(np.argmax(hopes > (1 - 1e-9) * hopes.max()))  # of equal ones the first
        self.runs[best] += 1
        return best

    def speeds(self) -> np.ndarray:
        """Tokens per second of every part; relative ones before anything was used."""
        if not self.steps:
            return self.beliefs.copy()
        usual = self.tokens.sum() / (self.beliefs * self.seconds).sum()  # where belief is 1
        weight = WEIGHT * self.seconds.sum() / self.steps
        return (self.tokens + weight * usual * self.beliefs) / (self.seconds + weight)

    def add(self, part: int, tokens: int, seconds: float) -> None:
        self.sums *= KEEP  # one array: code is cold after a pass
        self.sums[0, part] += tokens
        self.sums[1, part] += seconds
        self.steps = KEEP * self.steps + 1


@dataclass
class Turn:
    """Which part drafts for a sequence, for how many steps, and what it said in this one."""

    part: int = 0
    left: int = 0
    tree: Tree | None = None


class Router(Composite):
    """Lets `parts` compete; of equal ones the first drafts.

    scope: which sequences share what is known of the parts: "request" (none), "group" (samples of
    one prompt: a call with the same seed drafts the same again), "tenant" or "global". run: steps
    with one part. optimism: how much faster a part that was hardly used may be than it seems.
    Raises ConfigError for a run of no steps and for optimism below 0.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] = ("stand", "suffix"),
        scope: str = "group",
        run: int = 8,
        optimism: float = 0.12,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(parts, tokenizer)
        check_scope(scope)
        if run < 1 or not 0 <= optimism < np.inf:
            raise ConfigError(f"a router needs run >= 1, optimism >= 0, got {run=}, {optimism=}")
        self.scope, self.run, self.optimism = scope, run, optimism
        self._cost = Cost((1, 2), (1.0, 1.0))
        self._records: dict[tuple[Hashable, bool], Record] = {}
        self._turns: WeakKeyDictionary[Sequence, Turn] = WeakKeyDictionary()

    def beliefs(self, seq: Sequence) -> Many[float]:
        """How fast the parts are thought to be on such a sequence, one relative to another."""
        return [1.0] * len(self.parts)

    def bind(self, target: Target) -> None:
        super().bind(target)
        self._cost = curve_of(target)

    def seconds(self, nodes: int, num: int = 1) -> float:
        """The mean of its parts: who drafts differs by sequence."""
        return sum(part.seconds(nodes, num) for part in self.parts) / len(self.parts)

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        turn = self._turn(seq)
        part = self.parts[turn.part]
        turn.tree = signed(part.propose_one(seq, plan, dice), name_of(part))
        return turn.tree

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        if len(seqs) == 1:
            return [self.propose_one(seqs[0], plans[0], seqs[0].dice)]
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
        self._judge(step)
        super().observe(step)

    def hear(self, steps: Many[Step]) -> None:
        for step in steps:
            self._judge(step)
        super().hear(steps)

    def finish(self, seq: Sequence) -> None:
        self._turns.pop(seq, None)
        self._drop(seq)  # where nobody shares it
        super().finish(seq)

    def forget(self, group: Hashable) -> None:
        self._drop(group)
        super().forget(group)

    def speeds(self, seq: Sequence) -> dict[str, float]:
        """Tokens per second by part, as far as is known."""
        known = self._records.get(self._key(seq)) or Record(self.beliefs(seq))
        return dict(zip(self.names, known.speeds().tolist(), strict=True))

    def _judge(self, step: Step) -> None:
        """Adds what a step has made to the records of those who drafted in it."""
        keys = [key_of(self.scope, seq) for seq in step.seqs]
        num = Counter(keys)  # others must not show: requests with a seed share no record
        for key, seq, tree, emitted in zip(keys, step.seqs, step.trees, step.emitted, strict=True):
            turn = self._turns.get(seq)
            if turn and turn.tree is tree:  # else it was not asked, or somebody else's was used
                spent = self._spent(turn.part, len(tree), num[key])
                self._record(seq).add(turn.part, len(emitted), spent)
            if turn:
                turn.tree = None

    def _record(self, seq: Sequence) -> Record:
        key = self._key(seq)
        if key not in self._records:
            self._records[key] = Record(self.beliefs(seq))
        return self._records[key]

    def _key(self, seq: Sequence) -> tuple[Hashable, bool]:
        return key_of(self.scope, seq), seq.sampling.is_greedy  # parts fare otherwise there

    def _drop(self, key: Hashable) -> None:
        for is_greedy in (False, True):
            self._records.pop((key, is_greedy), None)

    def _turn(self, seq: Sequence) -> Turn:
        turn = self._turns.setdefault(seq, Turn())
        if not turn.left:
            turn.part, turn.left = self._record(seq).choose(self.optimism), self.run
        turn.left -= 1
        return turn

    def _spent(self, part: int, nodes: int, num: int) -> float:
        """Seconds of a sequence's share in a step in which all draft so many nodes."""
        whole = float(self._cost.at(num * (1 + nodes)))
        return whole / num + self.parts[part].seconds(nodes, num)
