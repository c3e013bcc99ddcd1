"""Selects one of several drafters: the one with the most tokens per second on this text.

A multi-armed bandit. Sequences that share a record draft with the same part, selected every few
steps by an upper confidence bound on its speed. The speed of a part is the tokens of its steps over
their modelled seconds (`engine/cost/step.py`), assuming that all concurrent sequences of the record
use it. `expected_tokens` is the prior of a part that was rarely used. Recent steps weigh more,
since drafters learn.

Exact: the choice depends on earlier steps only. Needs what its parts need.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from collections.abc import Sequence as Many
from operator import mul
from typing import Any
from weakref import WeakSet

from forerun.core.cost import Cost
from forerun.core.dice import Dice
from forerun.core.mixins import active_drafter, priced
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Drafter, Target
from forerun.core.scopes import check_scope, key_of
from forerun.core.tree import EMPTY, Tree, with_source
from forerun.drafters.base import Composite
from forerun.engine.cost.step import cost_of
from forerun.errors import ConfigError
from forerun.registry import DrafterName

DECAY = 0.998  # of all sums, per step
PRIOR_STEPS = 8.0  # steps that the prior counts for
SAMPLE_STEPS = 8.0  # steps per independent sample: neighbouring steps are correlated
INITIAL_NODES = 4.0  # mean nodes of a draft before the first one
CATCH_UP_STEPS = 32  # steps over which the cost of reading a text is spread
OPTIMISM = 0.5  # default
MAX_RECORDS = 1024  # beyond it the least recently used are dropped


class SpeedRecord:
    """Speed statistics of the parts on the sequences that share the record.

    expected_tokens: prior tokens per step of each part, relative to each other.
    """

    def __init__(self, expected_tokens: Many[float]) -> None:
        self.expected_tokens = list(expected_tokens)
        self.tokens, self.seconds, self.steps = (
            [0.0] * len(expected_tokens) for _ in range(3)
        )  # decayed
        self.nodes = INITIAL_NODES  # mean size of a draft
        self.seqs: WeakSet[Sequence] = WeakSet()  # that draft at present
        # the selected part, steps until the next selection, number of sequences at the selection
        self.part = self.left = self.chosen_num = 0

    @property
    def num(self) -> int:
        """Number of sequences that draft at once."""
        return max(len(self.seqs), 1)

    def upper_bounds(self, step_seconds: Many[float], optimism: float) -> list[float]:
        """Upper confidence bound on the speed of each part."""
        total = math.log1p(sum(self.steps) / SAMPLE_STEPS)
        widths = [optimism * math.sqrt(total / (1 + steps / SAMPLE_STEPS)) for steps in self.steps]
        pairs = zip(self.speeds(step_seconds), widths, strict=True)
        return [speed * (1 + width) for speed, width in pairs]

    def speeds(self, step_seconds: Many[float]) -> list[float]:
        """Tokens per second of every part; only relative before the first step.

        step_seconds: modelled seconds of a step with each part, for drafts of the mean size.
        """
        usual = 1.0  # tokens of a step at expected_tokens 1
        if made := sum(self.tokens):
            usual = made / sum(map(mul, self.expected_tokens, self.steps))
            usual = max(usual, 1 / min(self.expected_tokens))  # a step makes at least one token
        return [
            (tokens + PRIOR_STEPS * usual * prior) / (spent + PRIOR_STEPS * base)
            for tokens, spent, prior, base in zip(
                self.tokens, self.seconds, self.expected_tokens, step_seconds, strict=True
            )
        ]

    def add(self, part: int, tokens: int, seconds: float, nodes: int) -> None:
        """Adds a step with a part: tokens, share of its seconds, nodes of the draft."""
        for sums in (self.tokens, self.seconds, self.steps):
            for k in range(len(sums)):
                sums[k] *= DECAY
        self.tokens[part] += tokens
        self.seconds[part] += seconds
        self.steps[part] += 1
        self.left -= 1
        if nodes:
            self.nodes += (nodes - self.nodes) / PRIOR_STEPS


def first_best(values: Many[float]) -> int:
    """Index of the largest of positive values; of equal ones the first."""
    bound = (1 - 1e-9) * max(values)
    return next(k for k, value in enumerate(values) if value > bound)


class Router(Composite):
    """Selects the fastest of `parts`; of equal ones the first.

    scope: which sequences share a record: "request" (none), "group" (samples of one prompt),
    "tenant" or "global" (all; seeded drafts are then not reproducible). run: steps of a record
    between two selections. optimism: width of the confidence bound. Raises ConfigError for run
    below 1 and optimism below 0.
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
                f"a router cannot have the part {name!r}, which is a router too; list the parts of "
                "that one instead"
            )
        check_scope(scope)
        if run < 1 or not 0 <= optimism < math.inf:
            raise ConfigError(f"a router needs run >= 1, optimism >= 0, got {run=}, {optimism=}")
        self.scope, self.run, self.optimism = scope, run, optimism
        self._cost = Cost((1, 2), (1.0, 1.0))
        self._records: OrderedDict[tuple[Hashable, bool], SpeedRecord] = OrderedDict()

    def expected_tokens(self, seq: Sequence | None) -> Many[float]:
        """Prior tokens per step with each part, relative to each other. None: for any sequence."""
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
                self._unobserved(seqs[i]).append((k, EMPTY))  # stays if the part fails
            found = self.parts[k].propose(
                [seqs[i] for i in mine], [plans[i] for i in mine], [dice[i] for i in mine]
            )
            for i, tree in zip(mine, found, strict=True):
                trees[i] = with_source(tree, self.names[k])
                self._unobserved(seqs[i])[-1] = k, tree
        return trees

    def observe(self, step: Step) -> None:
        super().observe(step)
        for seq, tree, emitted in zip(step.seqs, step.trees, step.emitted, strict=True):
            self._credit(seq, tree, len(emitted))

    def finish(self, seq: Sequence) -> None:
        if record := seq.scratch.pop(self, None):
            record.seqs.discard(seq)
        self._drop(seq)  # with scope request the sequence is the key
        super().finish(seq)

    def forget(self, group: Hashable) -> None:
        self._drop(group)
        super().forget(group)

    def speeds(self, seq: Sequence) -> dict[str, float]:
        """Estimated tokens per second by part."""
        known = self._record(seq)
        return dict(zip(self.names, known.speeds(self._step_seconds(known)), strict=True))

    def _unobserved(self, seq: Sequence) -> deque[tuple[int, Tree]]:
        """Parts and trees of drafts in steps not observed yet."""
        return seq.scratch.setdefault((self, "unobserved"), deque(maxlen=2))

    def _credit(self, seq: Sequence, tree: Tree, num_emitted: int) -> None:
        """Adds a step to the statistics of the part that drafted in it."""
        drafted = self._unobserved(seq)
        while drafted:
            part, own = drafted.popleft()
            if own is tree:  # else the tree of another drafter was verified
                record, nodes = self._record(seq), len(tree)
                base = self._base_seconds(nodes, record.num)
                base += priced(self.parts[part]).draft_seconds(nodes, record.num)
                record.add(part, num_emitted, base, nodes)
                return

    def _choose(self, seq: Sequence) -> int:
        """The part for the next step; the record keeps the selection for `run` steps."""
        record = self._record(seq)
        if self._is_due(record, record.num):
            record.part = self._fastest(record)
            record.left, record.chosen_num = self.run, record.num
        return self._best(seq, record)

    def _best(self, seq: Sequence, record: SpeedRecord) -> int:
        """The part that would draft for a sequence now; changes no state."""
        num = len(record.seqs) + (self not in seq.scratch)
        part = self._fastest(record) if self._is_due(record, num) else record.part
        unread = priced(self.parts[part]).catch_up_seconds(seq)
        if not unread:
            return part
        step_seconds = self._step_seconds(record)
        step_seconds[part] += unread / CATCH_UP_STEPS
        return first_best(record.upper_bounds(step_seconds, self.optimism))

    def _is_due(self, record: SpeedRecord, num: int) -> bool:
        """Whether to select again: `run` steps have passed, or `num` sequences changed a lot."""
        return record.left <= 0 or not record.chosen_num / 2 < num < 2 * record.chosen_num

    def _fastest(self, record: SpeedRecord) -> int:
        return first_best(record.upper_bounds(self._step_seconds(record), self.optimism))

    def _first(self) -> Drafter:
        """The part with the highest prior speed."""
        record = SpeedRecord(self.expected_tokens(None))
        return self.parts[first_best(record.speeds(self._step_seconds(record)))]

    def _record(self, seq: Sequence) -> SpeedRecord:
        """The record of a sequence; a temporary one before its first draft."""
        own = seq.scratch.get(self) or self._records.get(self._key(seq))
        return own or SpeedRecord(self.expected_tokens(seq))

    def _join(self, seq: Sequence) -> None:
        """A sequence starts to draft."""
        if self in seq.scratch:
            return
        key = self._key(seq)
        record = seq.scratch[self] = self._records.setdefault(
            key, SpeedRecord(self.expected_tokens(seq))
        )
        record.seqs.add(seq)
        self._records.move_to_end(key)
        if len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def _key(self, seq: Sequence) -> tuple[Hashable, bool]:
        return key_of(self.scope, seq), seq.sampling.is_greedy  # greedy requests differ in speed

    def _drop(self, key: Hashable) -> None:
        for is_greedy in (False, True):
            self._records.pop((key, is_greedy), None)

    def _step_seconds(self, record: SpeedRecord) -> list[float]:
        """Modelled seconds of a step with each part, for drafts of the mean size."""
        nodes, num = round(record.nodes), record.num
        base = self._base_seconds(nodes, num)
        return [base + priced(part).draft_seconds(nodes, num) for part in self.parts]

    def _base_seconds(self, nodes: int, num: int) -> float:
        """A sequence's share of the seconds of a step in which all draft, without drafting."""
        return (self._cost.pass_time(num * (1 + nodes)) + self._cost.overhead(num, num)) / num
