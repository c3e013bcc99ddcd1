"""Chooses the draft size with the most expected tokens per second, or plain decoding.

A step over R rows takes c(R) seconds (`engine/cost`). Node i of a draft is accepted with
probability a_i, counted per drafter and scaled by a factor per sequence (`_acceptance.py`). The
nodes of all sequences are ranked by this probability and taken while tokens per second of the step
rise (`_tree_size.choose`). A sequence without nodes rests.

One account, in seconds, pays for drafts, empty drafts and learning. It starts at CREDIT_STEPS plain
steps. Each step adds the time saved over plain decoding plus PROBE_SHARE of a plain step, up to
MAX_CREDIT_STEPS. Below zero all sequences decode plainly until it holds one plain step again. So
drafts that are never accepted cost the credit once, and then PROBE_SHARE of the time. After an
empty draft, back off exponentially. A resting sequence probes as often as PROBE_SHARE allows; its
first FREE_PROBES may be at once, while the account holds more than CREDIT_STEPS.

No clock is read: equal costs, texts and seeds give equal plans. Costs that are measured between
steps are used from the next text on, if it has no seed.
"""

from __future__ import annotations

from collections.abc import Hashable

from forerun.controllers._acceptance import Acceptance, SequenceAcceptance
from forerun.controllers._tree_size import best_sizes
from forerun.controllers.fixed import MAX_NODES
from forerun.core.cost import Cost
from forerun.core.mixins import active_drafter, priced
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Controller, Drafter, Target
from forerun.engine.cost.step import cost_for, cost_of
from forerun.errors import ConfigError

PROBE_SIZE = 4  # nodes and steps of a probe at most; drafting steps between two decisions
FREE_PROBES = 4  # per sequence, that saved time may pay; from 0 again after a planned draft
PROBE_STEP_SHARE = 0.2  # of a plain step, for the nodes of a probe in each of its steps
CREDIT_STEPS = 4.0  # plain steps that drafts may lose at first
MAX_CREDIT_STEPS = 16.0  # plain steps that drafts may lose after they saved more
PROBE_SHARE = 0.01  # of plain decoding time, that drafts may lose in the long run
MARGIN = 0.2  # share of expected tokens ignored in the decision, since the maximum is biased
LEARN_PRICE = 0.3  # of a draft's overhead, for a sequence that learns only
MIN_WORTH = 0.5  # min acceptance of a node, as a share of its cost in tokens

PLAIN, LEARN = Plan(0, learns=False), Plan(0)


class Budget(Controller):
    """At most `nodes` nodes and `depth` levels; fewer or none if that is faster."""

    def __init__(self, *, nodes: int = 32, depth: int = 16) -> None:
        if not 1 <= nodes <= MAX_NODES or depth < 1:
            raise ConfigError(
                f"budget needs 1 to {MAX_NODES} nodes and a depth of at least 1, got {nodes=} and "
                f"{depth=}; for plain decoding use drafter 'none'"
            )
        self.nodes, self.depth = nodes, depth
        self._drafter, self._cost = Drafter(), Cost((1, 2), (1.0, 1.0))
        self._target: Target | None = None
        self._acceptances: dict[Drafter, Acceptance] = {}
        self._records: dict[Sequence, SequenceAcceptance] = {}  # of running sequences
        self._num_seqs = self._num_roots = 0  # of the last step
        self._plain_seconds = 0.0  # of the last step, had no sequence drafted
        self._account, self._is_overdrawn = 0.0, False  # seconds; see the module docstring
        self._steps_to_review = 0  # drafting steps until the next decision
        self._wait_steps, self._backoff_steps = 0.0, 1.0  # until the next draft; the next wait
        self._has_resting, self._probe_wait = False, 0.0  # steps until a resting sequence probes
        self._num_probes = 0

    def bind(self, target: Target, drafter: Drafter) -> None:
        self._drafter = drafter
        self._records.clear()
        if drafter.labels:  # else it never drafts
            self._target, self._cost = target, cost_of(target)

    def plan(self, seq: Sequence) -> Plan:
        if self._is_overdrawn or not self._drafter.labels:
            return PLAIN
        record = self._records.get(seq)
        if record is None and not self._records and self._target is not None:
            self._cost = cost_for(self._target, seq.sampling.seed)
        if not self._num_seqs:  # number of sequences is unknown before the first step
            return LEARN
        if record is None:
            acceptance = self._acceptance(active_drafter(self._drafter, seq))
            record = self._records[seq] = SequenceAcceptance(acceptance, LEARN)
            self._decide()
        if record.plan.is_empty:
            return record.plan
        if self._wait_steps >= 1:
            return LEARN
        active = active_drafter(self._drafter, seq)
        if record.acceptance.drafter is not active:
            self._decide()
        record.catch_up = priced(active).catch_up_seconds(seq)
        return record.plan

    def observe(self, step: Step) -> None:
        if not self._drafter.labels:
            return
        num, roots = len(step.seqs), len(step.seqs) - step.num_common
        self._plain_seconds = self._cost.pass_time(roots) + self._cost.overhead(num, 0)
        if (num, roots) != (self._num_seqs, self._num_roots):
            if not self._num_seqs:  # the first step
                self._account = CREDIT_STEPS * self._plain_seconds
            self._num_seqs, self._num_roots, self._steps_to_review = num, roots, 0
        self._wait_steps = max(self._wait_steps - 1, 0.0)
        self._probe_wait = max(self._probe_wait - 1, 0.0)
        self._settle(step)
        is_due = self._steps_to_review <= 0 or self._has_resting and self._probe_wait < 1
        if is_due and not self._is_overdrawn:
            self._steps_to_review = 0
            self._decide()

    def finish(self, seq: Sequence) -> None:
        self._records.pop(seq, None)

    def _settle(self, step: Step) -> None:
        """Counts accepted nodes, and adds the time saved or lost to the account."""
        drafts, empty, learning, spent = 0, 0, 0, 0.0
        catch_up: dict[Hashable, float] = {}  # shared by the samples of one prompt
        parts = zip(step.seqs, step.plans, step.trees, step.verdicts, strict=True)
        for seq, plan, tree, verdict in parts:
            record, size = self._records.get(seq), len(tree)
            drafts += size > 0
            empty += not size and plan.nodes > 0
            learning += not size and plan.nodes <= 0 and plan.learns
            if record is None or not (size or plan.nodes > 0):
                continue
            spent += record.acceptance.seconds(size)
            if size:
                text = seq if seq.group is None else seq.group
                catch_up[text] = max(catch_up.get(text, 0.0), record.catch_up)
                record.add(plan.nodes, size, verdict.nodes)
        num, tokens = len(step.seqs), sum(map(len, step.emitted))
        spent += self._cost.pass_time(self._num_roots + step.num_nodes) + sum(catch_up.values())
        spent += (
            self._cost.overhead(num, drafts, empty) + LEARN_PRICE * self._cost.per_draft * learning
        )
        saved = self._plain_seconds * (tokens / num + PROBE_SHARE) - spent
        self._account = min(self._account + saved, MAX_CREDIT_STEPS * self._plain_seconds)
        least = self._plain_seconds if self._is_overdrawn else 0.0
        self._is_overdrawn = self._account < least
        if drafts:
            self._steps_to_review, self._backoff_steps = self._steps_to_review - 1, 1.0
        elif any(plan.nodes > 0 for plan in step.plans):
            longest = self._cost.empty_draft_seconds(empty) / (PROBE_SHARE * self._plain_seconds)
            self._wait_steps = min(self._backoff_steps, max(longest, 1.0)) - 1
            self._backoff_steps = self._wait_steps * 2 + 2

    def _acceptance(self, drafter: Drafter) -> Acceptance:
        """The acceptance counts of a drafter."""
        if drafter not in self._acceptances:
            self._acceptances[drafter] = Acceptance(drafter, self.nodes, self._num_seqs)
        return self._acceptances[drafter]

    def _decide(self) -> None:
        """Chooses the plan of every sequence until the next decision."""
        is_review, records = self._steps_to_review <= 0, list(self._records.items())
        for seq, record in records:
            record.acceptance = self._acceptance(active_drafter(self._drafter, seq))
        if is_review:
            self._steps_to_review = PROBE_SIZE
            for acceptance in {record.acceptance for _, record in records}:
                acceptance.update(self._num_seqs)
        parts = [(record.factor, record.acceptance) for _, record in records]
        new = max(len(records) - self._num_seqs, 0)  # sequences that join with this step
        sizes, per_row, speed = best_sizes(
            parts, self._cost, self._num_seqs + new, self._num_roots + new, MARGIN
        )
        resting = []
        for (seq, record), size in zip(records, sizes, strict=True):
            if size:
                least = MIN_WORTH * speed * (per_row + record.acceptance.per_node)
                record.plan = Plan(size, self.depth, min_acceptance=least)
                record.num_probes = 0
            elif is_review or record.plan is not record.probe:  # else continue the probe
                record.plan = LEARN
                resting.append((seq, record))
        self._has_resting = bool(resting)
        if resting and self._probe_wait < 1:
            self._start_probe(*min(resting, key=lambda pair: pair[1].last_probe))

    def _start_probe(self, seq: Sequence, record: SequenceAcceptance) -> None:
        """Lets a resting sequence draft for PROBE_SIZE steps, if the account holds the price."""
        cost, num, acceptance = self._cost, self._num_seqs, record.acceptance
        plain, roots = self._plain_seconds, self._num_roots
        nodes = int(PROBE_STEP_SHARE * plain / max(acceptance.per_node, 1e-9))
        nodes = min(max(nodes, 1), PROBE_SIZE, self.nodes)
        extra = cost.pass_time(roots + nodes) - cost.pass_time(roots) + acceptance.seconds(nodes)
        extra += cost.overhead(num, 1) - cost.overhead(num, 0)
        price = priced(acceptance.drafter).catch_up_seconds(seq) + PROBE_SIZE * extra
        missing = min(price, CREDIT_STEPS * plain) - self._account
        if missing <= 0:
            self._num_probes += 1
            record.plan = record.probe = Plan(nodes, self.depth)
            record.last_probe, record.num_probes = self._num_probes, record.num_probes + 1
            missing = price
            if record.num_probes <= FREE_PROBES:
                missing -= max(self._account - CREDIT_STEPS * plain, 0.0)
        self._probe_wait = 1 + max(missing, 0.0) / (PROBE_SHARE * plain)  # in steps
