"""The loop. It names roles, never methods: plain decoding is the empty tree, and prefill is
pending tokens that the target catches up on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from operator import attrgetter
from time import perf_counter
from typing import Any

from forerun.core.dice import Dice
from forerun.core.logits import Laws, advance
from forerun.core.records import Plan, Rows, Sequence, Step
from forerun.core.roles import Controller, Drafter, Shaper, Target, Verifier, name_of
from forerun.core.tree import Tree
from forerun.engine.scheduler import Scheduler
from forerun.engine.stopping import Stops
from forerun.errors import ConfigError

FINISH = attrgetter("finish")


class Engine:
    """Draft, check in one pass, keep the target's law; one sequence or many.

    Raises ConfigError when the verifier cannot judge what the drafter may propose, or the target
    does not give what they need.
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
        self.listeners = [drafter.observe, controller.observe, *listeners]
        self.needs = drafter.needs | verifier.needs
        self.has_probes = "probes" in verifier.needs
        self.num_top_logits = max((part.num_top_logits for part in drafter.within()), default=0)
        self.scheduler = Scheduler(max_seqs)
        self._cancelled: deque[Sequence] = deque()  # by any thread; only ours writes seq.finish
        self._is_due = False  # whether somebody may have ended since the last `retire`

    def submit(self, seq: Sequence) -> None:
        """Queues a sequence. Raises ConfigError if the verifier cannot serve its sampling."""
        self.verifier.check(seq.sampling)
        self.scheduler.add(seq)
        self._is_due = True

    def step(self) -> list[Sequence]:
        """One round for every running sequence; returns those that ended since the last one.

        Engines on one target take turns; for `round` and `retire` the caller sees to that.
        """
        with self.target.turns:
            t0 = perf_counter()
            gone = self.retire()
            if self.scheduler.waiting:
                self.scheduler.admit(self._start)
            seqs = list(self.scheduler.running)
            if not seqs:
                return gone
            self.round(seqs, t0)
            ended = self.retire()
            return gone + ended if ended else gone

    def round(self, seqs: list[Sequence], start: float | None = None) -> None:
        """One round for some of the running ones: their texts grow together, or not at all."""
        t0 = perf_counter() if start is None else start
        is_due, self._is_due = self._is_due, True  # until nothing can fail any more
        plans: list[Plan] = []
        for seq in seqs:
            plan = self.controller.plan(seq)
            plans.append(plan if plan.is_empty else plan.within(seq.num_left - 1))
        trees = self.drafter.propose(seqs, plans)
        probed = list(map(self._probe, seqs, trees)) if self.has_probes else trees
        t1 = perf_counter()
        found = self.target.launch(seqs, probed, self.needs)  # one tree-attention pass
        self.drafter.overlap()
        self.target.collect()
        t2 = perf_counter()
        # what follows enters few functions, comprehensions and `list[...]()` too: a pass has made
        # their code cold
        leads = _leads(found) if len(found) > 1 else ()
        if self.has_probes:
            found = [part.split(len(tree)) for part, tree in zip(found, trees, strict=True)]
        laws: list[Laws] = []
        dice: list[Dice] = []
        starts: list[int] = []
        for rows, seq, tree, plan in zip(found, seqs, trees, plans, strict=True):
            laws.append(Laws(rows, seq, tree, self.shapers))
            if rows.is_away and self.drafter.learns_from(seq, plan):
                laws[-1].num_top_logits = self.num_top_logits
            dice.append(seq.dice)
            starts.append(len(seq.tokens))
        verdicts = self.verifier.verify_all(trees, laws, dice)
        t3 = perf_counter()
        drawn: list[list[int]] = []
        for verdict, tree in zip(verdicts, trees, strict=True):
            drawn.append(verdict.tokens(tree))
        emitted = self._extend(seqs, drawn)
        self.target.commit(seqs, probed, verdicts)
        times = {"draft": t1 - t0, "forward": t2 - t1, "verify": t3 - t2}
        self._publish(Step(seqs, plans, trees, laws, verdicts, emitted, times, t3, starts, leads))
        self._is_due = is_due or any(map(FINISH, seqs))

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while not self.scheduler.is_idle:
            self.step()

    def cancel(self, seq: Sequence) -> None:
        """Ends a sequence, waiting or running, at the next step; for any thread."""
        self._cancelled.append(seq)

    def retire(self) -> list[Sequence]:
        """Lets finished and cancelled sequences leave; returns them."""
        if not (self._is_due or self._cancelled):
            return []
        while self._cancelled:
            seq = self._cancelled.popleft()
            seq.finish = seq.finish or "cancelled"
        ended, dropped = self.scheduler.retire()
        for seq in ended:
            self.drafter.finish(seq)
            self.controller.finish(seq)
            self.stops.finish(seq)
            self.target.release(seq)
        self._is_due = False
        return ended + dropped

    def _probe(self, seq: Sequence, tree: Tree) -> Tree:
        return self.verifier.probe(tree, self.target.context - len(seq.tokens))

    def _start(self, seq: Sequence) -> None:
        seq.states = tuple(shaper.start(seq) for shaper in self.shapers)
        self.stops.start(seq)
        self.drafter.start(seq)

    def _extend(self, seqs: list[Sequence], drawn: list[list[int]]) -> list[list[int]]:
        """Appends to each what comes before its end, if that lies among its tokens."""
        try:
            kept = list(map(self.stops.cut, seqs, drawn))
            states = [seq.states for seq in seqs]
            for i, (now, tokens) in enumerate(zip(states, kept, strict=True)):
                if now.count(None) < len(now):
                    states[i] = self._advanced(now, tokens)
        except Exception:
            for seq in seqs:
                self.stops.renew(seq)
            raise
        for seq, more, state in zip(seqs, kept, states, strict=True):
            seq.tokens += more
            seq.states = state
        return kept

    def _advanced(self, states: tuple[Any, ...], tokens: list[int]) -> tuple[Any, ...]:
        """The states of a sequence's shapers after these tokens."""
        for token in tokens:
            states = advance(self.shapers, states, token)
        return states

    def _publish(self, step: Step) -> None:
        """All listeners hear the step; the first error among them is raised after that."""
        faults = []
        for hear in self.listeners:
            try:
                hear(step)
            except Exception as fault:
                faults.append(fault)
        if faults:
            raise faults[0]


def _leads(found: list[Rows]) -> Many[int]:
    """Whose rows each sequence took; nothing if all took their own."""
    leads = [rows.lead for rows in found]
    if leads.count(None) == len(leads):
        return ()
    return [i if lead is None else lead for i, lead in enumerate(leads)]


def check_pair(drafter: Drafter, verifier: Verifier) -> None:
    """Refuses a drafter whose draws the verifier cannot judge."""
    foreign = sorted(drafter.labels - verifier.judges)
    if foreign:
        name, rule = map(name_of, (drafter, verifier))
        raise ConfigError(
            f"{rule} judges {'/'.join(sorted(verifier.judges))} drafts, but drafter {name!r} "
            f"makes {'/'.join(foreign)} drafts; use another verifier or another grower"
        )


NEEDS = {"hidden": "hidden rows", "probes": "rows behind a draft"}


def check_needs(target: Target, needs: frozenset[str]) -> None:
    """Refuses parts that need of a pass what the target does not give."""
    if missing := sorted(needs - target.gives):
        what = " and ".join(NEEDS.get(need, need) for need in missing)
        raise ConfigError(
            f"target {name_of(target)!r} gives no {what}; use a drafter and a verifier that need "
            "none"
        )
