"""Never slower: the tree that makes the most tokens per second, which may be none.

A pass over N nodes takes T(1 + N) seconds (`engine/cost.py`); node i of a draft is accepted with
probability a_i, counted as steps go by and scaled to the sequence's own recent luck. The plan is
the N that maximises (1 + sum of a_i) / time. Growers that know chances beforehand get a threshold
as well: a node is worth a row if its chance exceeds tokens per second times seconds per row, on
average over the plan. Where nothing pays nothing is drafted, except a probe now and then: one
sequence tries for all that share the controller; the drafter goes on learning where that is cheap
beside a pass, so that a probe finds a text that has begun to repeat. No clock is read while it
runs: the same curve, texts and seeds give the same plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from forerun.controllers.fixed import MOST
from forerun.engine.cost import cost_of
from forerun.errors import ConfigError
from forerun.records import Cost, Plan, Sequence, Step
from forerun.roles import Controller, Drafter, Target

FIRST = 0.5, 0.8  # belief in node 0, and of each node in the one before it
WEIGHT = 4.0  # trials that the belief stands for
REVIEW = 4  # steps of a sequence between two decisions
KEEP = 0.99  # of the counts of nodes, per decision
SLOW, FAST = 0.98, 0.9  # memory of the step's averages, and of a sequence's luck
REST = 32  # steps of a sequence without a draft between two decisions
PATIENCE = 32, 1024  # passes in which a sequence rests between two probes: at first, at most
PROBE = 4  # nodes
MARGIN = 0.2  # of the tokens hoped for, without which drafting must pay: the best guess is too good
ASIDE = 1e-4  # seconds that a step spends on each sequence, whatever it drafts
LEARNING = 6e-5, 0.01  # seconds per sequence, about, and the share of a step they may take
NOTHING, LISTEN = Plan(0, learns=False), Plan(0)


@dataclass
class Luck:
    """How one sequence fares beside what its drafts promised; means over recent drafts."""

    plan: Plan = NOTHING
    promised: float = 1.0
    accepted: float = 1.0
    left: int = REVIEW  # drafts, or steps without one, until the next decision

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
        self.tries = np.full(nodes, WEIGHT)
        self.belief = FIRST[0] * FIRST[1] ** np.arange(nodes)
        self.hits = self.tries * self.belief
        self.gains = self._sums()  # gains[N]: tokens that N nodes promise
        self._cost = Cost((1, 2), (1.0, 1.0))
        self._drafting = np.zeros(nodes + 1)  # seconds beside the pass, by nodes
        self._luck: WeakKeyDictionary[Sequence, Luck] = WeakKeyDictionary()
        self._others = 0  # sequences beside one in the last step
        self._tokens, self._rows = 1.0, 1.0  # of a sequence in a step, means
        self._idle, self._pause = 0, PATIENCE[0]  # passes since the last probe, and until the next
        self._rests = False  # whether a sequence rests in this pass, so that it counts

    def bind(self, target: Target, drafter: Drafter) -> None:
        self._cost = cost_of(target)
        self._drafting = np.array([drafter.seconds(n) for n in range(self.nodes + 1)])

    def plan(self, seq: Sequence) -> Plan:
        luck = self._luck.get(seq)
        if luck is None:
            luck = self._luck[seq] = Luck()
            self._decide(luck)
        elif luck.plan.is_empty:
            self._rests = True
            luck.left -= 1
            if luck.left <= 0 or self._idle >= self._pause:
                self._decide(luck)
        return luck.plan

    def observe(self, step: Step) -> None:
        num = len(step.seqs)
        self._idle += self._rests
        self._rests = False
        self._others = num - 1
        self._tokens = _mean(self._tokens, sum(map(len, step.emitted)) / num, SLOW)
        self._rows = _mean(self._rows, 1 + sum(map(len, step.trees)) / num, SLOW)
        for seq, tree, verdict in zip(step.seqs, step.trees, step.verdicts, strict=True):
            if len(tree) and (luck := self._luck.get(seq)):
                self._learn(luck, min(len(tree), self.nodes), verdict.nodes)

    def finish(self, seq: Sequence) -> None:
        self._luck.pop(seq, None)

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
        luck.left, luck.plan = REVIEW, self._best(luck)
        if luck.plan.is_empty and self._idle >= self._pause:
            luck.plan = self._probe
            self._idle, self._pause = 0, min(2 * self._pause, PATIENCE[1])
        elif luck.plan.is_empty:
            luck.left = REST

    def _best(self, luck: Luck) -> Plan:
        """The nodes with the most tokens per second and the least chance that pays."""
        gains = np.array(self.gains) * luck.factor
        others = max(self._others, len(self._luck) - 1)  # some may have joined just now
        rows = 1 + others * self._rows + np.arange(self.nodes + 1)
        seconds = self._cost.at(rows) + ASIDE * (1 + others) + self._drafting
        tokens = 1 + others * self._tokens + gains
        best = int(np.argmax(tokens / seconds))
        if tokens[best] - MARGIN * gains[best] <= tokens[0] / seconds[0] * seconds[best]:
            learning, share = LEARNING
            return LISTEN if learning * (1 + others) <= share * seconds[0] else NOTHING
        per_row = (seconds[best] - seconds[1]) / max(best - 1, 1)
        return Plan(best, self.depth, least=float(per_row * tokens[best] / seconds[best]))

    def _sums(self) -> list[float]:
        """Sums of acceptance, which never rests on fewer than WEIGHT trials."""
        missing = np.maximum(WEIGHT - self.tries, 0)
        rates = (self.hits + missing * self.belief) / (self.tries + missing)
        return [0.0, *np.cumsum(rates).tolist()]


def _mean(old: float, new: float, keep: float) -> float:
    return keep * old + (1 - keep) * new
