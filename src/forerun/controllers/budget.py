"""The tree that makes the most tokens per second, which may be none.

A step over N rows takes the seconds that `engine/cost.py` has measured; node i of a draft is
accepted with probability a_i, counted as steps go by and scaled to the sequence's own recent luck.
The plan is the N that maximises (1 + sum of a_i) / time. Growers that know chances beforehand get a
threshold as well: a node is worth a row if its chance exceeds tokens per second times seconds per
row, on average over the plan. Where nothing pays nothing is drafted, except a probe now and then:
one sequence tries for all that share the controller; as many go on learning as is cheap beside a
pass, so that a probe finds a text that has begun to repeat.

Looks in vain come at growing distances: what a memory lacks at first is text, and learning alone
costs a tenth of a look. What all this costs, drafts, looks in vain and learning, is on one account
with what it saves: the seconds in which plain decoding would have made the same tokens. Only a
little credit is given at first and with every step; while the account is overdrawn all is plain
decoding. No clock is read while it runs: the same costs, texts and seeds give the same plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from forerun.controllers.fixed import MOST
from forerun.engine.cost import cost_of
from forerun.errors import ConfigError
from forerun.records import Cost, Plan, Sequence, Step
from forerun.roles import Controller, Drafter, Target

FIRST = 0.5, 0.8  # belief in node 0, and in each node where the one before it is certain
WEIGHT = 4.0  # trials that the belief stands for
REVIEW = 4  # steps of a sequence between two decisions
KEEP = 0.99  # of the counts of nodes, per decision
SLOW, FAST = 0.98, 0.9  # memory of the step's averages, and of a sequence's luck
REST = 64  # steps of a sequence without a draft between two decisions
PATIENCE = 32, 1024  # passes in which a sequence rests between two probes: at first, at most
PROBE = 4  # nodes
MARGIN = 0.2  # of the tokens hoped for, without which drafting must pay: the best guess is too good
# Measured with rare drafts among plain steps, whose passes make all code cold:
TRYING = 1.4e-4  # seconds of a step in which anything is looked up, each look and draft beside
HEARING = 6e-6  # seconds of a step in which something is only learned
LEARNING = 1.2e-5, 0.06  # seconds per sequence, and the share of a step that both may take
VAIN = 2  # doublings, at most, of the steps between looks in vain
CREDIT, DEAR = 32.0, 2.0  # plain steps of a lone sequence; less where drafts of all cost more steps
ALLOWED, MOST_SAVED = 0.005, 32.0  # plain steps, with every step and at most
BACK = 0.5  # plain steps on the account before drafts come back
PRICED = 64  # steps between two times that the drafter is asked for its price
SOBER = 50  # steps between two times that a debt is forgiven since the sequences have changed
NOTHING, LISTEN = Plan(0, learns=False), Plan(0)


@dataclass
class Luck:
    """How one sequence fares beside what its drafts promised; means over recent drafts."""

    plan: Plan = NOTHING
    promised: float = 1.0
    accepted: float = 1.0
    left: int = REVIEW  # drafts, or steps without one, until the next decision
    era: int = 0  # when it was decided

    @property
    def factor(self) -> float:
        return min(2.0, self.accepted / self.promised)


class Budget(Controller):
    """At most `nodes` nodes and `depth` levels; fewer, or none, where that is faster."""

    def __init__(self, *, nodes: int = 32, depth: int = 16) -> None:
        if not 1 <= nodes <= MOST or depth < 1:
            raise ConfigError(
                f"budget needs 1 to {MOST} nodes and a depth of at least 1, got {nodes=} and "
                f"{depth=}; to draft nothing use the drafter 'none'"
            )
        self.nodes, self.depth = nodes, depth
        self._probe = Plan(min(PROBE, nodes), depth)
        self.tries, self.hits = np.zeros(nodes), np.zeros(nodes)
        self.gains = self._sums()  # gains[N]: tokens that N nodes promise
        self._cost = Cost((1, 2), (1.0, 1.0))
        self._ask: Callable[..., list[float]] = lambda seqs, nodes, num: [0.0] * (nodes + 1)
        self._seconds = [0.0] * (nodes + 1)  # the same, by nodes; 0: a look in vain
        self._priced = 0  # steps for which they hold
        self._luck: WeakKeyDictionary[Sequence, Luck] = WeakKeyDictionary()
        self._num = 0  # sequences in the last step
        self._era, self._settled = 0, 0  # all are decided anew in a new era; sequences as it began
        self._tokens, self._rows, self._drafts = 1.0, 1.0, 0.0  # of a sequence in a step, means
        self._drafter = 0.0  # seconds of the drafter for a sequence in a step, mean
        self._vain, self._wait = 0, 0  # looks in vain at a stretch, and passes until the next look
        self._idle, self._pause = 0, PATIENCE[0]  # passes since the last probe, and until the next
        self._rests = False  # whether a sequence rests in this pass, so that it counts
        self._account: float | None = None  # seconds; none before the first step
        self._sober = SOBER  # steps since a debt was forgiven
        self._is_broke = False
        self._is_idle = False  # the drafter never drafts

    def bind(self, target: Target, drafter: Drafter) -> None:
        self._cost = cost_of(target)
        self._is_idle = not drafter.labels
        self._ask = drafter.prices
        if not self._is_idle:
            self._price(1)

    def plan(self, seq: Sequence) -> Plan:
        if self._is_broke or self._is_idle:
            return NOTHING
        luck = self._luck.get(seq)
        if luck is None:
            luck = self._luck[seq] = Luck()
            self._decide(luck)
        elif luck.era != self._era:
            self._decide(luck)
        elif luck.plan.is_empty:
            self._rests = True
            luck.left -= 1
            if luck.left <= 0 or self._idle >= self._pause:
                self._decide(luck)
        return LISTEN if self._wait and not luck.plan.is_empty else luck.plan

    def observe(self, step: Step) -> None:
        if self._is_idle:
            return
        num = self._num = len(step.seqs)
        sizes = [len(tree) for tree in step.trees]
        self._idle += self._rests
        self._rests = False
        self._tokens = _mean(self._tokens, sum(map(len, step.emitted)) / num, SLOW)
        self._rows = _mean(self._rows, 1 + sum(sizes) / num, SLOW)
        self._drafts = _mean(self._drafts, sum(map(bool, sizes)) / num, SLOW)
        drafter, hears, looks = 0.0, 0, False
        for i, plan in enumerate(step.plans):
            if plan.nodes > 0:
                looks, drafter = True, drafter + self._seconds[min(sizes[i], self.nodes)]
            elif plan.learns:
                hears += 1
        self._wait = max(self._wait - 1, 0)
        if looks:
            self._vain = 0 if any(sizes) else self._vain + 1
            self._wait = 2 ** min(max(self._vain - 1, 0), VAIN) - 1
        self._drafter = _mean(self._drafter, drafter / num, SLOW)
        aside = drafter + hears * LEARNING[0] + (TRYING if looks else HEARING if hears else 0.0)
        self._settle(step, sizes, aside)
        self._priced -= 1
        if self._priced <= 0:
            self._price(num)
        if not self._settled / 2 < num < 2 * self._settled:
            self._settled = num
            self._price(num)
            self._renew(num)
        for i, size in enumerate(sizes):
            if size and (luck := self._luck.get(step.seqs[i])):
                self._learn(luck, min(size, self.nodes), step.verdicts[i].nodes)

    def finish(self, seq: Sequence) -> None:
        self._luck.pop(seq, None)

    def _settle(self, step: Step, sizes: list[int], aside: float) -> None:
        """Puts on the account what a step has saved or spent beside plain decoding.

        aside: seconds for the drafter.
        """
        num, plain = len(sizes), self._plain(len(sizes))
        self._sober += 1
        if self._account is None:
            self._account = CREDIT * plain / num * min(1.0, (DEAR / self._dearness(num)) ** 3)
        self._account += ALLOWED * plain
        if aside:
            spent = self._cost.whole(num + sum(sizes)) + self._cost.aside(
                num, sum(map(bool, sizes))
            )
            spent += aside - plain
            self._account += plain * (sum(map(len, step.emitted)) / num - 1) - spent
        self._account = min(self._account, MOST_SAVED * plain)
        if self._account < 0:
            self._is_broke = True
        elif self._is_broke and self._account >= BACK * plain:
            self._renew(num)

    def _renew(self, num: int) -> None:
        """All are decided anew; a debt is forgiven and a probe comes at once, but seldom."""
        self._era += 1
        if self._sober >= SOBER:
            self._sober = 0
            self._account = max(self._account or 0.0, BACK * self._plain(num))
            self._idle = self._pause = PATIENCE[0]
        self._is_broke = self._account is not None and self._account < 0

    def _price(self, num: int) -> None:
        """Asks what drafts cost now, where so many decode at once."""
        self._seconds = self._ask(list(self._luck), self.nodes, num)
        self._priced = PRICED

    def _dearness(self, num: int) -> float:
        """Seconds of a step in which all draft a little over those of one in which nobody does."""
        few = self._probe.nodes
        spent = (
            self._cost.whole(num * (1 + few))
            + self._cost.aside(num, num)
            + num * self._seconds[few]
        )
        return (spent + TRYING) / self._plain(num)

    def _plain(self, num: int) -> float:
        """Seconds of a step of so many sequences in which nothing is drafted."""
        return self._cost.whole(num) + self._cost.aside(num, 0)

    def _learn(self, luck: Luck, size: int, accepted: list[int]) -> None:
        luck.promised = _mean(luck.promised, self.gains[size], FAST)
        luck.accepted = _mean(luck.accepted, len(accepted), FAST)
        self.tries[:size] += 1
        for node in accepted:
            if node < size:
                self.hits[node] += 1
        luck.left -= 1
        if luck.left:
            return
        self.tries, self.hits = KEEP * self.tries, KEEP * self.hits
        self.gains = self._sums()
        was_probe = luck.plan is self._probe
        self._decide(luck)
        if was_probe and not luck.plan.is_empty and luck.plan is not self._probe:
            self._pause = max(self._pause // 4, PATIENCE[0])

    def _decide(self, luck: Luck) -> None:
        """What a sequence drafts until the next decision: what pays best, nothing, or a probe."""
        luck.plan = NOTHING
        luck.left, luck.era, luck.plan = REVIEW, self._era, self._best(luck)
        if luck.plan.is_empty and self._idle >= self._pause:
            luck.plan = self._probe
            self._idle, self._pause = 0, min(2 * self._pause, PATIENCE[1])
        elif luck.plan.is_empty:
            luck.left = REST

    def _best(self, luck: Luck) -> Plan:
        """The nodes with the most tokens per second and the least chance that pays."""
        gains = np.array(self.gains) * luck.factor
        others = max(self._num, len(self._luck)) - 1  # some may have joined just now
        drafts = others * self._drafts
        rows = 1 + others * self._rows + np.arange(self.nodes + 1)
        seconds = self._cost.at(rows) + others * self._drafter
        seconds[0] += self._cost.aside(1 + others, drafts) + TRYING * min(drafts, 1.0)
        seconds[1:] += (
            self._cost.aside(1 + others, drafts + 1) + np.array(self._seconds[1:]) + TRYING
        )
        tokens = 1 + others * self._tokens + gains
        best = int(np.argmax(tokens / seconds))
        if tokens[best] - MARGIN * gains[best] <= tokens[0] / seconds[0] * seconds[best]:
            return self._resting(seconds[0])
        per_row = (seconds[best] - seconds[1]) / max(best - 1, 1)
        return Plan(best, self.depth, least=float(per_row * tokens[best] / seconds[best]))

    def _resting(self, seconds: float) -> Plan:
        """Some of those that rest may listen, in steps of so many seconds."""
        learning, share = LEARNING
        listening = sum(luck.plan is LISTEN for luck in self._luck.values())
        spent = HEARING + learning * (1 + listening)
        return LISTEN if spent <= share * seconds else NOTHING

    def _sums(self) -> list[float]:
        """Sums of acceptance; a node is believed to fare a little worse than the one before it."""
        sums, rate = [0.0], FIRST[0] / FIRST[1]
        for tries, hits in zip(self.tries.tolist(), self.hits.tolist(), strict=True):
            rate = (hits + WEIGHT * FIRST[1] * rate) / (tries + WEIGHT)
            sums.append(sums[-1] + rate)
        return sums


def _mean(old: float, new: float, keep: float) -> float:
    return keep * old + (1 - keep) * new
