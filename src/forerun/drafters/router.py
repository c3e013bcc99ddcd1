"""One of several drafters at a time: whichever makes the most tokens per second here.

Parts of any kind may compete, those that draw too, so nothing but use tells how a part fares. A
sequence drafts some steps with one part, then chooses anew: the one that may be fastest, since what
was hardly used of late may be faster than it seems (an upper confidence bound). A part's speed is
the tokens of its steps over their seconds (`passes.py`), as if all that share its record and decode
at once drafted with it. Of a part that was hardly used, tokens are believed to stand to those of
the others as `beliefs` say; its seconds are known. Recent steps weigh more, since memories grow.

Law: the choice rests on earlier steps alone, so labels stay true. Needs: what its parts need.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import mul
from typing import Any
from weakref import WeakKeyDictionary

from forerun.dice import Dice
from forerun.drafters.base import Composite
from forerun.engine.cost import cost_of
from forerun.errors import ConfigError
from forerun.ngrams.sharing import check_scope, key_of
from forerun.records import Cost, Plan, Sequence, Step
from forerun.registry import DrafterName
from forerun.roles import Drafter, Target
from forerun.tree import EMPTY, Tree, signed

KEEP = 0.998  # memory of steps
WEIGHT = 40.0  # steps that a belief stands for
FEW = 4.0  # nodes of a draft, as long as none was made
MOST = 1024  # records; the least recently begun on go


class Record:
    """How the parts have fared on all sequences that share it.

    beliefs: tokens of a step with each part, one relative to another. Plain numbers: they are
    touched once a step, when a pass has made all code cold.
    """

    def __init__(self, beliefs: Many[float]) -> None:
        self.beliefs = list(beliefs)
        self.tokens, self.seconds, self.steps, self.runs = (
            [0.0] * len(beliefs) for _ in range(4)
        )  # decayed
        self.nodes, self.num = FEW, 1  # of a draft, a mean; sequences that draft at once

    def choose(self, dues: Many[float], optimism: float) -> int:
        """The part of the next run."""
        known = math.log1p(sum(self.runs))
        doubts = [optimism * math.sqrt(known / (1 + runs)) for runs in self.runs]
        pairs = zip(self.speeds(dues), doubts, strict=True)
        best = first_best([speed * (1 + doubt) for speed, doubt in pairs])
        self.runs[best] += 1
        return best

    def speeds(self, dues: Many[float]) -> list[float]:
        """Tokens per second of every part; relative ones before anything was used.

        dues: seconds of a step with each part, for drafts of the present size.
        """
        usual = 1.0  # of a step at belief 1
        if made := sum(self.tokens):
            usual = made / sum(map(mul, self.beliefs, self.steps))
            usual = max(usual, 1 / min(self.beliefs))  # a step makes a token, whoever drafts
        return [
            (tokens + WEIGHT * usual * belief) / (spent + WEIGHT * due)
            for tokens, spent, belief, due in zip(
                self.tokens, self.seconds, self.beliefs, dues, strict=True
            )
        ]

    def add(self, part: int, tokens: int, seconds: float, nodes: int, num: int) -> None:
        """A step with a part: its tokens, a share of its seconds, its draft, who drafted."""
        for sums in (self.tokens, self.seconds, self.steps, self.runs):
            for k in range(len(sums)):
                sums[k] *= KEEP
        self.tokens[part] += tokens
        self.seconds[part] += seconds
        self.steps[part] += 1
        self.num = num
        if nodes:
            self.nodes += (nodes - self.nodes) / WEIGHT

    def shares(self, dues: Many[float]) -> list[float]:
        """Which part of all drafts each part makes, about; the fastest all before any is made."""
        weights = [*self.runs]
        weights[first_best(self.speeds(dues))] += 1
        total = sum(weights)
        return [weight / total for weight in weights]


def first_best(values: Many[float]) -> int:
    """The place of the largest of positive values; of equal ones the first."""
    least = (1 - 1e-9) * max(values)
    return next(k for k, value in enumerate(values) if value > least)


@dataclass
class Turn:
    """Which part drafts for a sequence, and for how many steps more; what is known of the parts."""

    record: Record
    part: int = 0
    left: int = 0


class Router(Composite):
    """Lets `parts` compete; of equal ones the first drafts.

    scope: which sequences share what is known of the parts: "request" (none), "group" (samples of
    one prompt), "tenant" or "global" (all: a seed then does not give the same drafts again). run:
    steps with one part. optimism: how much faster a part that was hardly used may be than it seems.
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
        if inner := next((part for part in self.parts if isinstance(part, Router)), None):
            name = type(inner).__name__.lower()
            raise ConfigError(
                f"a router chooses among drafters, and its part {name!r} does so itself; name the "
                "parts of that one instead"
            )
        check_scope(scope)
        if run < 1 or not 0 <= optimism < math.inf:
            raise ConfigError(f"a router needs run >= 1, optimism >= 0, got {run=}, {optimism=}")
        self.scope, self.run, self.optimism = scope, run, optimism
        self._cost = Cost((1, 2), (1.0, 1.0))
        self._records: OrderedDict[tuple[Hashable, bool], Record] = OrderedDict()
        self._turns: WeakKeyDictionary[Sequence, Turn] = WeakKeyDictionary()
        # what was said for a step that is not judged yet
        self._asked: WeakKeyDictionary[Sequence, Tree] = WeakKeyDictionary()

    def beliefs(self, seq: Sequence | None) -> Many[float]:
        """Tokens that steps with each part are thought to make, one relative to another.

        None: for any sequence.
        """
        return [1.0] * len(self.parts)

    def bind(self, target: Target) -> None:
        super().bind(target)
        self._cost = cost_of(target)

    def seconds(self, nodes: int, num: int = 1, seqs: Many[Sequence] = ()) -> float:
        costs = [part.seconds(nodes, num, seqs) for part in self.parts]
        return sum(map(mul, self._shares(seqs), costs))

    def hope(self, num: int = 1) -> tuple[float, float]:
        """That of the part which is believed to be the fastest."""
        record = Record(self.beliefs(None))
        record.num = num
        return self.parts[first_best(record.speeds(self._dues(record)))].hope(num)

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        k = self._turn(seq)
        self._asked[seq] = EMPTY  # of a part that fails
        tree = signed(self.parts[k].propose_one(seq, plan, dice), self.names[k])
        self._asked[seq] = tree
        return tree

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        if any(seq not in self._turns for seq in seqs):
            self._begin(seqs)
        turns = [self._turn(seq) for seq in seqs]
        trees = [EMPTY] * len(seqs)
        for k in dict.fromkeys(turns):
            mine = [i for i, turn in enumerate(turns) if turn == k]
            name, part = self.names[k], self.parts[k]
            self._asked.update((seqs[i], EMPTY) for i in mine)  # of a part that fails
            found = part.propose([seqs[i] for i in mine], [plans[i] for i in mine])
            for i, tree in zip(mine, found, strict=True):
                trees[i] = self._asked[seqs[i]] = signed(tree, name)
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
        self._asked.pop(seq, None)
        self._drop(seq)  # where nobody shares it
        super().finish(seq)

    def forget(self, group: Hashable) -> None:
        self._drop(group)
        super().forget(group)

    def speeds(self, seq: Sequence) -> dict[str, float]:
        """Tokens per second by part, as far as is known."""
        known = self._records.get(self._key(seq)) or Record(self.beliefs(seq))
        return dict(zip(self.names, known.speeds(self._dues(known)), strict=True))

    def _judge(self, step: Step) -> None:
        """Adds what a step has made to the records of those who drafted in it."""
        asked = {seq: self._asked.pop(seq) for seq in step.seqs if seq in self._asked}
        if not asked:
            return
        keys = [key_of(self.scope, seq) for seq in step.seqs]
        num = Counter(keys) if len(keys) > 1 else {keys[0]: 1}  # who has a seed knows of no others
        for key, seq, tree, emitted in zip(keys, step.seqs, step.trees, step.emitted, strict=True):
            turn = self._turns.get(seq)
            if turn and asked.get(seq) is tree:  # else somebody else's was used
                nodes, others = len(tree), num[key]
                due = self._due(nodes, others) + self.parts[turn.part].seconds(nodes, others)
                turn.record.add(turn.part, len(emitted), due, nodes, others)

    def _begin(self, seqs: Many[Sequence]) -> None:
        """Those that are new join a record, which is told how many draft at once."""
        for seq in seqs:
            if seq not in self._turns:
                self._turns[seq] = Turn(self._record(seq))
        for record, num in Counter(self._turns[seq].record for seq in seqs).items():
            record.num = num

    def _record(self, seq: Sequence) -> Record:
        key = self._key(seq)
        if key not in self._records:
            self._records[key] = Record(self.beliefs(seq))
            if len(self._records) > MOST:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return self._records[key]

    def _key(self, seq: Sequence) -> tuple[Hashable, bool]:
        return key_of(self.scope, seq), seq.sampling.is_greedy  # parts fare otherwise there

    def _drop(self, key: Hashable) -> None:
        for is_greedy in (False, True):
            self._records.pop((key, is_greedy), None)

    def _turn(self, seq: Sequence) -> int:
        """Who drafts for it in this step."""
        if seq not in self._turns:
            self._begin([seq])
        turn = self._turns[seq]
        if not turn.left:
            record = turn.record
            turn.part, turn.left = record.choose(self._dues(record), self.optimism), self.run
        turn.left -= 1
        return turn.part

    def _shares(self, seqs: Many[Sequence]) -> list[float]:
        """How much of what is drafted for these sequences each part drafts, on average."""
        known = {id(r): r for seq in seqs if (r := self._records.get(self._key(seq)))}
        records = list(known.values()) or [Record(self.beliefs(seqs[0] if seqs else None))]
        shares = [record.shares(self._dues(record)) for record in records]
        return [sum(each) / len(shares) for each in zip(*shares, strict=True)]

    def _dues(self, record: Record) -> list[float]:
        """Seconds of a step with each part, for drafts as they are at present."""
        nodes, num = round(record.nodes), record.num
        due = self._due(nodes, num)
        return [due + part.seconds(nodes, num) for part in self.parts]

    def _due(self, nodes: int, num: int) -> float:
        """Seconds of a sequence's share in a step in which all draft so many nodes; not theirs."""
        return (self._cost.whole(num * (1 + nodes)) + self._cost.aside(num, num)) / num
