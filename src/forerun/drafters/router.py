"""One of several drafters at a time: the one that makes the most tokens per second here.

Parts of any kind may compete, also those that draw, so only use shows how fast a part is. Sequences
that share a record draft with the same part, chosen again every few steps: the one that may be the
fastest, where a part that was rarely used may be faster than it seems (an upper confidence bound).
A part's speed is the tokens of its steps over their seconds (`engine/cost/step.py`), as if all that
share its record and decode at once drafted with it. Of a part that was hardly used, tokens are
believed to stand to those of the others as `beliefs` say; its seconds are known. Recent steps weigh
more, since memories grow.

Law: the choice rests on earlier steps alone, so labels stay true. Needs: what its parts need.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from collections.abc import Sequence as Many
from operator import mul
from typing import Any
from weakref import WeakSet

from forerun.core.dice import Dice
from forerun.core.mixins import active_drafter, priced
from forerun.core.records import Cost, Plan, Sequence, Step
from forerun.core.roles import Drafter, Target
from forerun.core.scopes import check_scope, key_of
from forerun.core.tree import EMPTY, Tree, signed
from forerun.drafters.base import Composite
from forerun.engine.cost.step import cost_of
from forerun.errors import ConfigError
from forerun.registry import DrafterName

KEEP = 0.998  # memory of steps
WEIGHT = 8.0  # steps that a belief stands for
GRAIN = 8.0  # steps that are one sample of a part's speed: neighbours are alike
FEW = 4.0  # nodes of a draft, as long as none was made
LASTS = 32  # steps over which the reading of a text is spread
OPTIMISM = 0.5  # default
MAX_RECORDS = 1024  # the least recently joined go


class Record:
    """How the parts have fared on all sequences that share it.

    beliefs: tokens of a step with each part, one relative to another.
    """

    def __init__(self, beliefs: Many[float]) -> None:
        self.beliefs = list(beliefs)
        self.tokens, self.seconds, self.steps = ([0.0] * len(beliefs) for _ in range(3))  # decayed
        self.nodes = FEW  # of a draft, a mean
        self.seqs: WeakSet[Sequence] = WeakSet()  # that draft at present
        # the part that drafts, for how many more steps, and the batch when that was chosen
        self.part = self.left = self.crowd = 0

    @property
    def num(self) -> int:
        """Sequences that draft at once."""
        return max(len(self.seqs), 1)

    def merits(self, dues: Many[float], optimism: float) -> list[float]:
        """How fast each part may be: its speed, the more above that the less it was used."""
        known = math.log1p(sum(self.steps) / GRAIN)
        doubts = [optimism * math.sqrt(known / (1 + steps / GRAIN)) for steps in self.steps]
        pairs = zip(self.speeds(dues), doubts, strict=True)
        return [speed * (1 + doubt) for speed, doubt in pairs]

    def speeds(self, dues: Many[float]) -> list[float]:
        """Tokens per second of every part; relative ones before anything was used.

        dues: seconds of a step with each part, for drafts of the present size.
        """
        usual = 1.0  # of a step at belief 1
        if made := sum(self.tokens):
            usual = made / sum(map(mul, self.beliefs, self.steps))
            usual = max(usual, 1 / min(self.beliefs))  # every step makes a token
        return [
            (tokens + WEIGHT * usual * belief) / (spent + WEIGHT * due)
            for tokens, spent, belief, due in zip(
                self.tokens, self.seconds, self.beliefs, dues, strict=True
            )
        ]

    def add(self, part: int, tokens: int, seconds: float, nodes: int) -> None:
        """A step with a part: its tokens, a share of its seconds, its draft."""
        for sums in (self.tokens, self.seconds, self.steps):
            for k in range(len(sums)):
                sums[k] *= KEEP
        self.tokens[part] += tokens
        self.seconds[part] += seconds
        self.steps[part] += 1
        self.left -= 1
        if nodes:
            self.nodes += (nodes - self.nodes) / WEIGHT


def first_best(values: Many[float]) -> int:
    """The place of the largest of positive values; of equal ones the first."""
    least = (1 - 1e-9) * max(values)
    return next(k for k, value in enumerate(values) if value > least)


class Router(Composite):
    """Lets `parts` compete; of equal ones the first drafts.

    scope: which sequences share what is known of the parts: "request" (none), "group" (samples of
    one prompt), "tenant" or "global" (all: a seed then does not give the same drafts again). run:
    steps between two choices, those of all that share a record counted. optimism: how much faster a
    part that was hardly used may be than it seems. Raises ConfigError for a run of no steps and for
    optimism below 0.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] = ("stand", "suffix"),
        scope: str = "group",
        run: int = 8,
        optimism: float = OPTIMISM,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(parts, tokenizer)
        if inner := next((part for part in self.parts if isinstance(part, Router)), None):
            name = type(inner).__name__.lower()
            raise ConfigError(
                f"a router chooses among drafters, and its part {name!r} does so itself; list the "
                "parts of that one instead"
            )
        check_scope(scope)
        if run < 1 or not 0 <= optimism < math.inf:
            raise ConfigError(f"a router needs run >= 1, optimism >= 0, got {run=}, {optimism=}")
        self.scope, self.run, self.optimism = scope, run, optimism
        self._cost = Cost((1, 2), (1.0, 1.0))
        self._records: OrderedDict[tuple[Hashable, bool], Record] = OrderedDict()

    def beliefs(self, seq: Sequence | None) -> Many[float]:
        """Tokens that steps with each part are thought to make, one relative to another.

        None: for any sequence.
        """
        return [1.0] * len(self.parts)

    def bind(self, target: Target) -> None:
        super().bind(target)
        self._cost = cost_of(target)

    def active_drafter(self, seq: Sequence) -> Drafter:
        return active_drafter(self.parts[self._best(seq, self._record(seq))], seq)

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        return priced(self._first()).draft_seconds(nodes, num)

    def catch_up_seconds(self, seq: Sequence) -> float:
        return priced(self.active_drafter(seq)).catch_up_seconds(seq)

    def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
        return priced(self._first()).acceptance_prior(num)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        for seq in seqs:
            self._join(seq)
        chosen = [self._choose(seq) for seq in seqs]
        trees = [EMPTY] * len(seqs)
        for k in dict.fromkeys(chosen):
            mine = [i for i, part in enumerate(chosen) if part == k]
            for i in mine:
                self._unjudged(seqs[i]).append((k, EMPTY))  # of a part that fails
            found = self.parts[k].propose(
                [seqs[i] for i in mine], [plans[i] for i in mine], [dice[i] for i in mine]
            )
            for i, tree in zip(mine, found, strict=True):
                trees[i] = signed(tree, self.names[k])
                self._unjudged(seqs[i])[-1] = k, tree
        return trees

    def observe(self, step: Step) -> None:
        super().observe(step)
        for seq, tree, emitted in zip(step.seqs, step.trees, step.emitted, strict=True):
            self._judge(seq, tree, len(emitted))

    def finish(self, seq: Sequence) -> None:
        if record := seq.scratch.pop(self, None):
            record.seqs.discard(seq)
        self._drop(seq)  # if it shared its record with no other
        super().finish(seq)

    def forget(self, group: Hashable) -> None:
        self._drop(group)
        super().forget(group)

    def speeds(self, seq: Sequence) -> dict[str, float]:
        """Tokens per second by part, as far as is known."""
        known = self._record(seq)
        return dict(zip(self.names, known.speeds(self._dues(known)), strict=True))

    def _unjudged(self, seq: Sequence) -> deque[tuple[int, Tree]]:
        """Parts with the trees that they drafted in steps that were not observed yet."""
        return seq.scratch.setdefault((self, "unjudged"), deque(maxlen=2))

    def _judge(self, seq: Sequence, tree: Tree, num_emitted: int) -> None:
        """Adds what a step has made to the record of the part that drafted in it."""
        drafted = self._unjudged(seq)
        while drafted:
            part, own = drafted.popleft()
            if own is tree:  # else another drafter's was used
                record, nodes = self._record(seq), len(tree)
                due = self._due(nodes, record.num)
                due += priced(self.parts[part]).draft_seconds(nodes, record.num)
                record.add(part, num_emitted, due, nodes)
                return

    def _choose(self, seq: Sequence) -> int:
        """The part that drafts in the next step; its record keeps the choice for `run` steps."""
        record = self._record(seq)
        if self._is_due(record, record.num):
            record.part = self._fastest(record)
            record.left, record.crowd = self.run, record.num
        return self._best(seq, record)

    def _best(self, seq: Sequence, record: Record) -> int:
        """The part that drafts for a sequence if it is asked now; nothing changes."""
        num = len(record.seqs) + (self not in seq.scratch)
        part = self._fastest(record) if self._is_due(record, num) else record.part
        unread = priced(self.parts[part]).catch_up_seconds(seq)
        if not unread:
            return part
        dues = self._dues(record)
        dues[part] += unread / LASTS
        return first_best(record.merits(dues, self.optimism))

    def _is_due(self, record: Record, num: int) -> bool:
        """Whether a part is to be chosen again, where `num` sequences draft at once."""
        return record.left <= 0 or not record.crowd / 2 < num < 2 * record.crowd

    def _fastest(self, record: Record) -> int:
        return first_best(record.merits(self._dues(record), self.optimism))

    def _first(self) -> Drafter:
        """The part that is believed to be the fastest."""
        record = Record(self.beliefs(None))
        return self.parts[first_best(record.speeds(self._dues(record)))]

    def _record(self, seq: Sequence) -> Record:
        """The record of a sequence; a new one, which is not kept, before it has drafted."""
        own = seq.scratch.get(self) or self._records.get(self._key(seq))
        return own or Record(self.beliefs(seq))

    def _join(self, seq: Sequence) -> None:
        """A sequence begins to draft."""
        if self in seq.scratch:
            return
        key = self._key(seq)
        record = seq.scratch[self] = self._records.setdefault(key, Record(self.beliefs(seq)))
        record.seqs.add(seq)
        self._records.move_to_end(key)
        if len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def _key(self, seq: Sequence) -> tuple[Hashable, bool]:
        return key_of(self.scope, seq), seq.sampling.is_greedy  # parts fare otherwise there

    def _drop(self, key: Hashable) -> None:
        for is_greedy in (False, True):
            self._records.pop((key, is_greedy), None)

    def _dues(self, record: Record) -> list[float]:
        """Seconds of a step with each part, for drafts as they are at present."""
        nodes, num = round(record.nodes), record.num
        due = self._due(nodes, num)
        return [due + priced(part).draft_seconds(nodes, num) for part in self.parts]

    def _due(self, nodes: int, num: int) -> float:
        """Seconds of a sequence's share in a step in which all draft so many nodes; not theirs."""
        return (self._cost.whole(num * (1 + nodes)) + self._cost.aside(num, num)) / num
