"""The trees that make the most tokens per second together, which may be none.

A step over N rows takes the seconds that `engine/cost/step.py` has measured; node i of a draft is
accepted with probability a_i, counted as steps go by, for each drafter apart where several compete
(`controllers/_acceptance.py`), and scaled to the sequence's own recent luck. Of the nodes of all
sequences the likeliest are taken, as many as maximise tokens / time of the whole step: what the
first draft of a step costs is shared by all that draft. Growers that know chances beforehand get
a threshold as well: a node is worth a row if its chance exceeds half of tokens per second times
seconds per row, on average over the step. Where nothing pays nothing is drafted, except a probe now
and then: one sequence tries for all that share the controller; as many go on learning as is cheap,
so that a probe finds a text that has begun to repeat. The first step drafts nothing: it shows how
many run at once.

Looks in vain come at growing distances, up to a small share of the time: what a memory lacks at
first is text, and learning alone costs a fraction of a look. Unless the account is overdrawn, a
text that begins is tried soon, however long others have rested: it may be a sample of a prompt that
has been learned meanwhile.

What all this costs, drafts, looks in vain and learning, is on one account with what it saves: the
seconds in which plain decoding would have made the same tokens. Only a little credit is given at
first and with every step; to a lone text in parts as those before it end. At first it is little
where looks are dear beside a plain step: short answers of a tiny model stay plain. While the
account is overdrawn all is plain decoding, and the controller does next to nothing: on a tiny model
its own work would cost more than the drafts. So it is where all rest and the account does not hold
the price of the next probe: a draft model has to read the text first. No clock is read while it
runs: the same costs, texts and seeds give the same plans.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from forerun.controllers._acceptance import Counts
from forerun.controllers._tree_size import choose
from forerun.controllers.fixed import MOST
from forerun.core.mixins import active_drafter, parts_of, priced
from forerun.core.records import Cost, Plan, Sequence, Step
from forerun.core.roles import Controller, Drafter, Target
from forerun.engine.cost.step import cost_of
from forerun.errors import ConfigError

REVIEW = 4  # steps with drafts between two decisions
FAST = 0.9  # memory of a sequence's luck
PATIENCE = 8, 1024  # passes in which a sequence rests between two probes: at first, at most
PROBE = 4  # nodes
BARGAIN = 0.5  # of a row's price, what a node's chance must be worth: growers know it too low
MARGIN = 0.2  # of the tokens hoped for, without which drafting must pay: the best guess is too good
MANY = 0.15  # of a drafter's price, more for each further part that learns, and for choosing
LEARNING = 0.3, 0.16  # of a look in vain, to learn only; the share of a step that it may take
VAIN = 0.02  # of the time, at most, for looks in vain: their distance doubles up to there
CREDIT = 32.0  # plain steps, for lone sequences one after the other
TOGETHER = 16.0  # plain steps of one sequence, for all of a batch together
FIRST = 8.0, 2.0  # of the credit: at most at first; to a lone one at least as it and others end
LOOK = 0.06  # of a plain step: where looks of all cost more there is less at first
ALLOWED, MOST_SAVED = 0.005, 32.0  # plain steps, with every step and at most
BACK = 0.5  # plain steps on the account before drafts come back
SAVED = 0.1  # plain steps, at least, between two tries to pay for a probe
BEGIN = 4.0  # looks, before the first: all that a drafter begins with costs about as much
SOBER = 50  # steps between two times that a debt is forgiven since the sequences have changed
NOTHING, LISTEN = Plan(0, learns=False), Plan(0)


@dataclass
class Luck:
    """How one sequence fares beside what its drafts promised; means over recent drafts."""

    counts: Counts  # of who drafts for it
    plan: Plan = NOTHING
    reading: float = 0.0  # seconds of the next draft that go to what was not read of its text
    promised: float = 1.0
    accepted: float = 1.0
    probe: int = 0  # number of its last probe

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
        self._drafter = Drafter()
        self._counts: dict[Drafter, Counts] = {}
        self._unasked = Counts(self._drafter, nodes)  # of sequences until something is decided
        self._expect(Cost((1, 2), (1.0, 1.0)))
        self._luck: dict[Sequence, Luck] = {}  # of running ones
        self._num, self._plain = 0, 0.0  # sequences in the last step; its seconds without drafts
        self._common = 0  # of them those that took rows of others; the rest are roots
        self._settled = 0  # roots as they last were when all was begun anew
        self._left = REVIEW  # steps with drafts until the next decision
        self._vain, self._wait = 0, 0  # looks in vain at a stretch, and passes until the next look
        self._idle, self._pause = 0, PATIENCE[0]  # passes since the last probe, and until the next
        self._probes = 0
        self._rests = False  # whether a sequence rests, so that passes count
        self._account: float | None = None  # seconds; none before the first step
        self._first = 0.0  # plain steps of credit at first for one alone
        self._owed = 0.0  # plain steps: credit of a lone sequence that is still to come
        self._sober = SOBER  # steps since a debt was forgiven
        self._is_broke, self._back = False, BACK  # all is plain until so much is on the account
        self._is_idle = False  # the drafter never drafts

    def bind(self, target: Target, drafter: Drafter) -> None:
        self._drafter, self._is_idle = drafter, not drafter.labels
        self._luck.clear()  # of sequences that were given up elsewhere
        if self._is_idle:  # nothing to price: steps need not be measured
            return
        num = sum(priced(part).learns for part in parts_of(drafter))
        self._expect(cost_of(target).drafted(1 + MANY * max(num - 1, 0)))
        self._unasked = Counts(drafter, self.nodes)
        self._best([Luck(self._unasked)])  # compiled before anything waits for it
        self._first, back = self._credit(1)
        self._is_broke = self._first < back  # the first steps are plain, at no cost at all

    def plan(self, seq: Sequence) -> Plan:
        if self._is_broke or self._is_idle:
            return NOTHING
        luck = self._luck.get(seq)
        if luck is None:
            luck = self._luck[seq] = Luck(self._unasked)
            if self._idle >= PATIENCE[0]:
                self._idle = self._pause  # what other texts taught since then may help this one
            if self._num:  # else nothing is priced: the first step shows how many run
                self._decide(is_probing=True)
        elif (
            self._num
            and not self._wait
            and luck.counts.drafter is not active_drafter(self._drafter, seq)
        ):
            self._decide(is_probing=True)
        if luck.plan.is_empty:
            return luck.plan
        if self._wait:
            return LISTEN
        luck.reading = priced(luck.counts.drafter).catch_up_seconds(seq)
        return luck.plan

    def observe(self, step: Step) -> None:
        if self._is_idle:
            return
        num = len(step.seqs)
        self._sober += 1
        common = step.num_common if step.leads else 0
        if (num, common) != (self._num, self._common):
            self._resize(num, common)
        if self._is_broke:  # most steps where drafts do not pay: as little as can be
            self._account += ALLOWED * self._plain  # type: ignore[operator]
            if self._account >= self._back * self._plain:
                self._renew()
            return
        self._idle += self._rests
        self._balance(step)
        if not self._is_broke and (self._left <= 0 or self._rests and self._idle >= self._pause):
            self._decide()

    def finish(self, seq: Sequence) -> None:
        self._luck.pop(seq, None)
        if self._owed:  # it has taught what the next one may try
            more = min(max(self._first, FIRST[1]), self._owed)
            self._owed -= more
            self._account = (self._account or 0.0) + more * self._plain / max(self._num, 1)

    def _expect(self, cost: Cost) -> None:
        """Steps cost so much."""
        self._cost = cost
        self._curve = np.array(cost.rows, float), np.array(cost.seconds)

    def _balance(self, step: Step) -> None:
        """What a step has saved or spent beside plain decoding."""
        looks = hears = 0
        for plan in step.plans:
            if plan.nodes > 0:
                looks += 1
            elif plan.learns:
                hears += 1
        saved = ALLOWED * self._plain
        if hears:
            saved -= self._hearing(hears)
        if looks:
            saved += self._settle(step, looks)
        else:
            self._wait = max(self._wait - 1, 0)
        self._account = min((self._account or 0.0) + saved, MOST_SAVED * self._plain)
        self._is_broke = self._account < 0

    def _settle(self, step: Step, looks: int) -> float:
        """What a step with looks teaches; the seconds that it has saved."""
        num, drafts, nodes, tokens, spent = len(step.seqs), 0, 0, 0, 0.0
        heard: dict[Counts, int] = {}
        readings: dict[Hashable, float] = {}  # samples of one prompt read it once
        for i, seq in enumerate(step.seqs):
            size, asked = len(step.trees[i].tokens), step.plans[i].nodes
            tokens += len(step.emitted[i])
            drafts += size > 0
            nodes += size
            luck = self._luck.get(seq)
            if luck is None or asked <= 0 and not size:
                continue
            counts = luck.counts
            if counts.priced <= 0:
                counts.price(num)
            if not size:
                spent += counts.vain
                continue
            spent += counts.each + counts.per_node * size
            if luck.reading:
                text = seq if seq.group is None else seq.group
                readings[text] = max(readings.get(text, 0.0), luck.reading)
            heard[counts] = heard.get(counts, 0) + 1
            size, accepted = min(size, self.nodes), step.verdicts[i].nodes
            luck.promised = FAST * luck.promised + (1 - FAST) * counts.gains[size]
            luck.accepted = FAST * luck.accepted + (1 - FAST) * len(accepted)
            counts.add(asked, size, accepted)
        for counts, count in heard.items():
            counts.decay(count)
        if drafts:
            self._left -= 1
            self._vain = 0
        else:
            self._vain += 1
            longest = self._cost.vain(looks) / (VAIN * self._plain)
            self._wait = int(min(2.0 ** min(self._vain - 1, 30), max(longest, 1.0))) - 1
        rows = num - self._common + (step.num_nodes if step.leads else nodes)
        spent += self._cost.whole(rows) + self._cost.aside(num, drafts, looks - drafts)
        return self._plain * tokens / num - spent - sum(readings.values())

    def _hearing(self, hears: int) -> float:
        """Seconds of a step in which so many sequences only learn."""
        return LEARNING[0] * self._cost.vain(hears)

    def _resize(self, num: int, common: int) -> None:
        """Other sequences than before run at once, or as many say the same as another."""
        if self._rests and num < self._num:  # what did not pay beside so many may pay now
            self._left = 0
        self._num, self._common, roots = num, common, num - common
        self._plain = self._cost.whole(roots) + self._cost.aside(num, 0)
        first, back = self._credit(num)
        if self._account is None:  # in steps as they will be: what is common soon is not
            self._account, self._back = first * self._apart(num), back
            self._owed = CREDIT - first if num == 1 else 0.0
            self._is_broke = first < back
        if not self._settled / 2 < roots < 2 * self._settled:
            self._settled = roots
            for counts in self._counts.values():
                counts.price(num)
            if first >= back:  # nothing is forgiven where a try is dear
                self._renew()

    def _apart(self, num: int) -> float:
        """Seconds of a plain step of so many that have nothing in common."""
        return self._cost.whole(num) + self._cost.aside(num, 0)

    def _credit(self, num: int) -> tuple[float, float]:
        """Plain steps that so many are given at first, and what is needed to begin."""
        look = self._cost.vain(num) / self._apart(num)
        share = (LOOK / max(look, LOOK)) ** 2
        return min(FIRST[0], TOGETHER / num) * share, max(BACK, BEGIN * look)

    def _renew(self) -> None:
        """All are decided anew; a debt is forgiven and a probe comes at once, but seldom."""
        self._back = BACK
        if self._sober >= SOBER:
            self._sober = 0
            self._account = max(self._account or 0.0, BACK * self._plain)
            self._idle = self._pause = PATIENCE[0]
        self._is_broke = self._account is not None and self._account < 0
        if not self._is_broke:
            self._decide()

    def _of(self, drafter: Drafter) -> Counts:
        """What is known of one of those that draft."""
        counts = self._counts.get(drafter)
        if counts is None:
            counts = self._counts[drafter] = Counts(drafter, self.nodes)
        return counts

    def _decide(self, *, is_probing: bool = False) -> None:
        """What all draft until the next decision: what pays best, nothing, or a probe.

        is_probing: a probe that is under way goes on.
        """
        if not is_probing:
            self._left = REVIEW
        running = [*self._luck.items()]
        if not running:  # all came while nothing was drafted, or others plan for them
            return
        known: set[Counts] = set()
        for seq, luck in running:
            luck.counts = counts = self._of(active_drafter(self._drafter, seq))
            if counts not in known:
                known.add(counts)
                if counts.priced <= 0:
                    counts.price(self._num)
                counts.review(REVIEW)
        sizes, per_row, speed = self._best([*self._luck.values()])
        plans: dict[tuple[int, Counts], Plan] = {}  # most are alike
        resting: list[tuple[Sequence, Luck]] = []
        for (seq, luck), size in zip(running, sizes, strict=True):
            if luck.plan is self._probe:
                if size:
                    self._pause = max(self._pause // 4, PATIENCE[0])
                elif is_probing:
                    continue
            if not size:
                luck.plan = self._resting(len(resting))
                resting.append((seq, luck))
                continue
            kind = size, luck.counts
            if kind not in plans:
                least = BARGAIN * speed * (per_row + luck.counts.per_node)
                plans[kind] = Plan(size, self.depth, least=least)
            luck.plan = plans[kind]
        self._rests = bool(resting)
        if resting and self._idle >= self._pause:
            pair = min(reversed(resting), key=lambda pair: pair[1].probe)  # who waits the longest
            if self._try(*pair):
                self._rests = len(resting) > 1
            elif len(resting) < len(running):  # the others earn the price: asked again later
                self._idle = 0
            elif not is_probing:  # else some have plans already; the next decision is none
                self._is_broke = True

    def _try(self, seq: Sequence, luck: Luck) -> bool:
        """A probe by one that rests, until the next decision, if the account holds its price."""
        drafter, held = priced(luck.counts.drafter), max(self._account or 0.0, 0.0)
        price = drafter.catch_up_seconds(seq) + REVIEW * drafter.draft_seconds(self._probe.nodes)
        if price > held:
            self._back = max(price, held + SAVED * self._plain) / self._plain
            return False
        self._idle, self._pause = 0, min(2 * self._pause, PATIENCE[1])
        self._probes += 1
        luck.plan, luck.probe = self._probe, self._probes
        return True

    def _best(self, lucks: list[Luck]) -> tuple[list[int], float, float]:
        """Nodes of each sequence, seconds of a row more, and tokens per second."""
        num = max(self._num, len(lucks))  # some may have joined just now
        cost, roots = self._cost, num - self._common
        prices: list[tuple[float, float, float]] = []
        beliefs: list[np.ndarray] = []
        for luck in lucks:
            counts = luck.counts
            beliefs.append(counts.beliefs)
            prices.append((luck.factor, cost.per_draft + counts.each, counts.per_node))
        sizes = np.empty(len(lucks), np.int64)
        per_row, speed = choose(
            np.array(beliefs) if len(beliefs) > 1 else beliefs[0][None],
            np.array(prices),
            num,
            roots,
            *self._curve,
            cost.aside(num, 1) - cost.per_draft,
            num / (cost.whole(roots) + cost.aside(num, 0)),
            MARGIN,
            sizes,
        )
        return sizes.tolist(), per_row, speed

    def _resting(self, others: int) -> Plan:
        """Of those that rest some may listen, beside so many others."""
        return LISTEN if self._hearing(1 + others) <= LEARNING[1] * self._plain else NOTHING
