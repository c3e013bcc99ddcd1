"""The engine loop: draft, verify, commit.

Plain decoding is the empty tree. Prefill is a forward pass over pending tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from forerun.core.allowed import AllowedTokens, legal_part
from forerun.core.forward_batch import ForwardBatch, missing
from forerun.core.logits import TargetProbs, advance
from forerun.core.mixins import observes, parts_of
from forerun.core.records import Plan, Rows, Sequence, Step, Verdict
from forerun.core.roles import Controller, Drafter, Shaper, Target, Verifier, name_of
from forerun.core.tree import Tree
from forerun.engine.pair_error import pair_error
from forerun.engine.safe_drafter import observe_pending
from forerun.engine.scheduler import Scheduler
from forerun.engine.stats import StepTimer, timed, timed_step
from forerun.engine.stopping import Stops
from forerun.errors import ConfigError


@dataclass
class Draft:
    """The draft trees of one step; one entry per sequence."""

    seqs: list[Sequence]
    plans: list[Plan]
    trees: list[Tree]
    probed: list[Tree]  # the trees with the probe nodes of the verifier


@dataclass
class Verified:
    """The verdicts on a draft, not committed yet."""

    draft: Draft
    laws: list[TargetProbs]
    verdicts: list[Verdict]
    leads: Many[int]  # see `Step.leads`


class Engine:
    """Runs sequences with speculative decoding: draft, verify in one forward pass, commit.

    `step` is the loop body; `draft`, `verify` and `commit` are its parts, for other schedules.
    Raises ConfigError if the verifier does not support the drafter's labels, or the target does
    not provide what they need.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        controller: Controller,
        *,
        stops: Stops | None = None,
        shapers: Many[Shaper] = (),
        listeners: Many[Callable[[Step], None]] = (),
        max_seqs: int = 1,
    ) -> None:
        check_pair(drafter, verifier)
        check_needs(target, drafter.needs | verifier.needs)
        drafter.bind(target)
        verifier.bind(target)
        controller.bind(target, drafter)
        self.target, self.drafter = target, drafter
        self.verifier, self.controller = verifier, controller
        self.stops = stops or Stops()
        self.shapers = tuple(shapers)
        self.timer = StepTimer()
        self.listeners = [self.timer.record, drafter.observe, controller.observe, *listeners]
        self.needs = drafter.needs | verifier.needs
        self.num_top_logits = max(part.num_top_logits for part in parts_of(drafter))
        self.scheduler = Scheduler(max_seqs)
        self._cancelled: deque[Sequence] = deque()  # filled by any thread

    def submit(self, seq: Sequence) -> None:
        """Queues a sequence. Raises ConfigError if the verifier does not support its sampling."""
        self.verifier.check(seq.sampling)
        self.scheduler.add(seq)

    @timed_step
    def step(self) -> list[Sequence]:
        """One step for every running sequence; returns those that ended since the last step.

        Holds the target's lock. Callers of `round` and `retire` must hold it themselves.
        """
        with self.target.lock:
            ended = self.retire()
            self.scheduler.admit(self._start)
            if self.scheduler.running:
                self.round(list(self.scheduler.running))
                ended += self.retire()
                if self.target.between_steps is not None:
                    self.target.between_steps()
            return ended

    def round(self, seqs: list[Sequence]) -> None:
        """One step for some running sequences; on an error none of them changes."""
        draft = self.draft(seqs)
        verified = self.verify(draft)
        self.commit(verified)

    @timed
    def draft(self, seqs: list[Sequence]) -> Draft:
        """A plan and a tree for each sequence."""
        plans = [self._plan(seq) for seq in seqs]
        drafts = self.drafter.propose(seqs, plans, [seq.dice for seq in seqs])
        trees = [_usable(*pair) for pair in zip(drafts, seqs, strict=True)]
        probed = trees
        if "probes" in self.verifier.needs:
            probed = [self._probe(*pair) for pair in zip(seqs, trees, strict=True)]
        return Draft(seqs, plans, trees, probed)

    @timed
    def verify(self, draft: Draft) -> Verified:
        """One forward pass over all trees, and the verdict on each."""
        found = self.forward(draft)
        leads = _leads(found)
        if draft.probed is not draft.trees:
            pairs = zip(found, draft.trees, strict=True)
            found = [rows.split(len(tree)) for rows, tree in pairs]
        each = zip(found, draft.seqs, draft.trees, draft.plans, strict=True)
        laws = [self._laws(*one) for one in each]
        dice = [seq.dice for seq in draft.seqs]
        return Verified(draft, laws, self.verifier.verify_all(draft.trees, laws, dice), leads)

    @timed
    def forward(self, draft: Draft) -> list[Rows]:
        """The forward pass of `verify`. Meanwhile the drafter observes the last step and reads."""
        found = self.target.launch(ForwardBatch(draft.seqs, draft.probed, self.needs))
        observe_pending(self.drafter)
        if self.target.is_async:
            pairs = zip(draft.seqs, draft.plans, strict=True)
            if seqs := [seq for seq, plan in pairs if observes(self.drafter, seq, plan)]:
                self.drafter.read(seqs)
        self.target.collect()
        return found

    def commit(self, verified: Verified) -> Step:
        """Appends the accepted tokens, up to a stop, and calls all listeners."""
        draft, verdicts = verified.draft, verified.verdicts
        starts = [len(seq.tokens) for seq in draft.seqs]
        pairs = zip(verdicts, draft.trees, strict=True)
        emitted = self._extend(draft.seqs, [verdict.tokens(tree) for verdict, tree in pairs])
        for seq, verdict, tokens in zip(draft.seqs, verdicts, emitted, strict=True):
            seq.logw += sum(verdict.logws[: len(tokens)])
        self.target.commit(draft.seqs, draft.probed, verdicts)
        step = Step(
            draft.seqs,
            draft.plans,
            draft.trees,
            verified.laws,
            verdicts,
            emitted,
            starts=starts,
            leads=verified.leads,
        )
        self._publish(step)
        return step

    def run(self) -> None:
        """Steps until all sequences have ended."""
        while not self.scheduler.is_idle:
            self.step()

    def cancel(self, seq: Sequence) -> None:
        """Ends a waiting or running sequence at the next step. Thread-safe."""
        self._cancelled.append(seq)

    def retire(self) -> list[Sequence]:
        """Removes finished and cancelled sequences and returns them."""
        while self._cancelled:
            seq = self._cancelled.popleft()
            seq.finish = seq.finish or "cancelled"
        ended, dropped = self.scheduler.retire()
        for seq in ended:
            self.drafter.finish(seq)
            self.controller.finish(seq)
            self.stops.finish(seq)
            self.target.release(seq)
        return ended + dropped

    def _start(self, seq: Sequence) -> None:
        seq.shapers = self.shapers
        seq.states = tuple(shaper.start(seq) for shaper in self.shapers)
        self.stops.start(seq)
        self.drafter.start(seq)

    def _plan(self, seq: Sequence) -> Plan:
        """The controller's plan, with depth limited by the tokens left and by the target."""
        plan = self.controller.plan(seq)
        if plan.is_empty:
            return plan
        return plan.within(min(seq.num_left - 1, self.target.max_depth(seq)))

    def _probe(self, seq: Sequence, tree: Tree) -> Tree:
        return self.verifier.probe(tree, self.target.context - len(seq.tokens))

    def _laws(self, rows: Rows, seq: Sequence, tree: Tree, plan: Plan) -> TargetProbs:
        laws = TargetProbs(rows, seq, tree, self.shapers)
        if rows.is_on_device and observes(self.drafter, seq, plan):
            laws.num_top_logits = self.num_top_logits
        return laws

    def _extend(self, seqs: list[Sequence], drawn: list[list[int]]) -> list[list[int]]:
        """Appends to each sequence its tokens up to a stop; on an error to none of them."""
        try:
            kept = [self.stops.cut(*pair) for pair in zip(seqs, drawn, strict=True)]
            states = [self._advanced(*pair) for pair in zip(seqs, kept, strict=True)]
        except Exception:
            for seq in seqs:
                self.stops.reset(seq)
            raise
        for seq, tokens, state in zip(seqs, kept, states, strict=True):
            seq.tokens += tokens
            seq.states = state
        return kept

    def _advanced(self, seq: Sequence, tokens: list[int]) -> tuple[Any, ...]:
        """The shaper states of a sequence after these tokens."""
        states = seq.states
        if states.count(None) == len(states):
            return states
        for token in tokens:
            states = advance(self.shapers, states, token)
        return states

    def _publish(self, step: Step) -> None:
        """Calls all listeners, then raises the first of their errors, with notes on the others."""
        errors = []
        for listener in self.listeners:
            try:
                listener(step)
            except Exception as error:
                errors.append(error)
        if not errors:
            return
        for other in errors[1:]:
            errors[0].add_note(f"another listener failed too: {type(other).__name__}: {other}")
        raise errors[0]


def _usable(tree: Tree, seq: Sequence) -> Tree:
    """The tree without nodes that cannot be accepted."""
    tree = tree.without_nodes_below(seq.end_ids)
    allowed = AllowedTokens.of(seq) if len(tree) else None
    return tree if allowed is None else legal_part(tree, allowed)


def _leads(found: list[Rows]) -> Many[int]:
    """`Step.leads` of a pass."""
    leads = [rows.lead for rows in found]
    if leads.count(None) == len(leads):
        return ()
    return [i if lead is None else lead for i, lead in enumerate(leads)]


def check_pair(drafter: Drafter, verifier: Verifier) -> None:
    """Raises ConfigError if the verifier does not support all labels of the drafter."""
    if not drafter.labels <= verifier.judges:
        raise pair_error(drafter, verifier)


NEEDS = {"hidden": "hidden rows", "probes": "probe rows"}


def check_needs(target: Target, needs: frozenset[str]) -> None:
    """Raises ConfigError if the target does not provide all needs."""
    if lacking := missing(needs, target.gives):
        what = " and ".join(NEEDS.get(need, need) for need in lacking)
        raise ConfigError(
            f"target {name_of(target)!r} gives no {what}; use a drafter and a verifier that do "
            "not need them"
        )
