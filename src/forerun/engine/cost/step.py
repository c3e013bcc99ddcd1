"""The time of a step: its forward pass (`forward.py`) plus overhead per sequence and draft.

The overhead is measured in rounds of the engine loop with a real drafter, as the step time minus
the pass time. The extra pass time of several sequences is the difference of two passes with the
same number of rows.

Measured seconds are cached on disk. Ahead of the first text a start measures only what is not in
the cache, for START_SECONDS at most; between the steps of the first texts it measures what is
left, or checks what it has read. Texts with a seed are planned by the costs of the start, so that
the same call gives the same texts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from forerun import registry
from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Controller, Target
from forerun.core.sampling import Sampling
from forerun.engine.cost.forward import (
    MEASURED_ROWS,
    MIN_CURVE_POINTS,
    PREFIX_TOKENS,
    Pass,
    curve,
    dummy_tokens,
    pass_seconds,
    seconds_left,
)
from forerun.engine.cost.measurement import Limits, Measurement, min_seconds
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter, observe_pending
from forerun.errors import CapacityError, ConfigError

START_SECONDS = 0.3, 1.5  # min of each measurement and max of all before the first text
DRAFT_MODEL_SECONDS = 0.1, 0.5  # the same for a draft model; its target is measured too
PART_SHARE = 0.6  # of the max seconds, for each of three measurements
SETUP_PASSES = 3  # over the prefixes of MEASURED_SEQS sequences, before overhead is measured
FULL_SECONDS = 0.5, 30.0  # min and max of each measurement for benchmarks
BETWEEN_SECONDS = 0.0, 0.1  # min and max seconds of measuring between two steps
BETWEEN_SHARE = 0.1  # of the time from the first step on, spent on measuring between steps
MEASURED_SEQS, DRAFT_NODES = 8, 4  # concurrent sequences, and nodes of each draft
PLAIN_PLAN, DRAFT_PLAN = Plan(0, learns=False), Plan(DRAFT_NODES)
EMPTY_PLAN = Plan(DRAFT_NODES, min_acceptance=2.0)  # no node qualifies, so the draft is empty
MAX_PASS_SECONDS = 0.1  # over MEASURED_SEQS rows; above it the overhead is negligible
COLD_FACTOR = 2.0  # time of a draft between plain steps over that in measured rounds: cold caches

Round = tuple[int, int, int]  # number of sequences, of drafts, of empty drafts


def cost_of(target: Target, limits: Limits | None = None, *, is_full: bool = False) -> Cost:
    """The step costs of a target: already set, read from the cache, or measured.

    limits: min seconds of each measurement and max seconds of all; default START_SECONDS.
    is_full: measures and checks all with FULL_SECONDS, and leaves nothing to the first texts.
    """
    if target.cost is None:
        costs = StepCosts(with_own_cache(target))
        if is_full:
            costs.complete(FULL_SECONDS)
        elif not costs.is_known:
            costs.measure(limits or START_SECONDS)
        target.cost = costs.cost()
        target.between_steps = BetweenSteps(target, costs) if costs.has_work else None
    return target.cost


def cost_for(target: Target, seed: int | None) -> Cost:
    """The step costs by which a text is planned; with a seed those of the start."""
    return cost_of(target) if seed is not None else target.refined_cost or cost_of(target)


def with_own_cache(target: Target) -> Target:
    """A target on the same weights with an empty cache, so that kept prompts stay in theirs.

    The target itself if it has none, or on a GPU, where a second cache takes memory and time.
    """
    if target.is_async or target.is_slow_at_first:
        return target
    try:
        return target.twin()
    except ConfigError:
        return target


class StepCosts:
    """The measurements of a target: passes, rounds of the engine loop, passes of several texts."""

    def __init__(self, target: Target) -> None:
        self.target, self.seqs = target, _room(target)
        pairs = [(1, rows) for rows in MEASURED_ROWS]
        self.passes = Measurement(target, "", pairs, partial(pass_seconds, target))
        self.rounds: Measurement[Round] | None = None
        self.several: Measurement[Pass] | None = None
        if seqs := self.seqs:
            rounds, passes = partial(_rounds, target, seqs), partial(pass_seconds, target)
            self.rounds = Measurement(target, f"-x{seqs}", _kinds(seqs), rounds)
            pairs = sorted({(1, seqs), (seqs, seqs)})
            self.several = Measurement(target, f"-s{seqs}", pairs, passes)
        self._unchecked = [part for part in self.parts() if part.is_complete]

    @property
    def is_known(self) -> bool:
        """Whether there are enough times of passes for a curve."""
        return sum(map(math.isfinite, self.passes.seconds)) >= MIN_CURVE_POINTS

    @property
    def has_work(self) -> bool:
        """Whether times are missing, or not checked since they were read."""
        return bool(self._unchecked) or not all(part.is_complete for part in self.parts())

    def parts(self) -> list[Measurement[Any]]:
        """The measurements of which the cost is made; those of overhead only for fast passes."""
        overhead = [part for part in (self.rounds, self.several) if part is not None]
        if not self.is_known or curve(self.passes.seconds).at(self.seqs) >= MAX_PASS_SECONDS:
            overhead = []
        return [self.passes, *overhead]

    def measure(self, limits: Limits) -> None:
        """Measures passes, then overhead as far as the time is long enough."""
        started = perf_counter()
        self.passes.run((limits[0], PART_SHARE * limits[1]))
        for part in self.parts()[1:]:
            _, left = seconds_left(limits, started)
            if left > SETUP_PASSES * curve(self.passes.seconds).at(MEASURED_SEQS * PREFIX_TOKENS):
                part.run((limits[0], min(PART_SHARE * limits[1], left)))

    def complete(self, limits: Limits) -> None:
        """Measures all that is missing or outdated."""
        for part in (self.passes, self.rounds, self.several):
            if part in self.parts() and (not part.is_complete or part.is_outdated(limits)):
                part.run(limits)
        self._unchecked.clear()

    def advance(self, limits: Limits) -> None:
        """Measures or checks a part of what is left to do."""
        if self._unchecked:
            part = self._unchecked.pop()
            if part.is_outdated(limits):
                part.run(START_SECONDS)
        elif missing := next((part for part in self.parts() if not part.is_complete), None):
            missing.run(limits)

    def cost(self) -> Cost:
        """The cost by what is known; the overhead is 0 where it is not."""
        found, (_, *overhead) = curve(self.passes.seconds), self.parts()
        if not overhead or not all(part.is_complete for part in overhead):
            return found
        rounds, several = overhead
        seconds = dict(zip(rounds.kinds, rounds.seconds, strict=True))
        return _fitted(found, seconds, several.seconds[-1] - several.seconds[0], self.seqs)


class BetweenSteps:
    """Measures between steps, for at most BETWEEN_SHARE of the time, until all is known."""

    def __init__(self, target: Target, costs: StepCosts) -> None:
        self._target, self._costs = target, costs
        self._started: float | None = None  # time of the first call
        self._spent = 0.0
        least = costs.cost().pass_time(PREFIX_TOKENS)
        self._expected = BETWEEN_SECONDS[1] + 2 * least  # seconds of the next measurement

    def __call__(self) -> None:
        now = perf_counter()
        if self._started is None:
            self._started = now
        if self._spent + self._expected > BETWEEN_SHARE * (now - self._started):
            return
        self._target.between_steps = None  # the measurement takes steps too
        with suppress(CapacityError):  # running texts need the room
            self._costs.advance(BETWEEN_SECONDS)
        self._expected = perf_counter() - now
        self._spent += self._expected
        if self._costs.has_work:
            self._target.between_steps = self
        else:
            self._target.refined_cost = self._costs.cost()


class _FirstSequences(Controller):
    """The first `drafts` sequences draft, the next `empty` have empty drafts."""

    drafts = empty = 0

    def plan(self, seq: Sequence) -> Plan:
        if seq.index < self.drafts:
            return DRAFT_PLAN
        return EMPTY_PLAN if seq.index < self.drafts + self.empty else PLAIN_PLAN


def _kinds(seqs: int) -> list[Round]:
    """The rounds to measure."""
    drafting = [(num, drafts, 0) for num in sorted({1, seqs}) for drafts in sorted({0, 1, num})]
    return drafting + [(seqs, 0, empty) for empty in sorted({1, seqs})]


def _rounds(
    target: Target, seqs: int, kinds: Many[Round], tries: int, limits: Limits
) -> list[float]:
    """Seconds of rounds of the engine loop without their passes, within the limits."""
    started = perf_counter()
    controller, length = _FirstSequences(), _length(target)
    drafter = registry.make("drafter", registry.TREE_DRAFTER)
    verifier = registry.make("verifier", registry.DEFAULT_VERIFIER)
    last = deque[Step](maxlen=1)
    safe = SafeDrafter(drafter)
    engine = Engine(target, safe, verifier, controller, listeners=[last.append], max_seqs=seqs)
    for part in (target, verifier):
        part.warm_up()
    running = [
        Sequence(text, length, Sampling(), SeededDice(i), limit=1 << 30, group=0, index=i)
        for i, text in enumerate(dummy_tokens(target, length, i) for i in range(seqs))
    ]

    def run(kind: Round) -> float:
        num, controller.drafts, controller.empty = kind
        for seq in running:
            del seq.tokens[length:]
        start = perf_counter()
        engine.round(running[:num])
        observe_pending(safe)  # before the next round shortens the texts
        return perf_counter() - start - _pass_time(last[0])

    try:
        for seq in running:
            engine.submit(seq)
        engine.step()  # prefill
        run((seqs, seqs, 0))  # fills the drafter's memory
        works, sizes = [partial(run, kind) for kind in kinds], [_num_rows(*kind) for kind in kinds]
        return min_seconds(works, sizes, tries, seconds_left(limits, started))
    finally:
        for seq in running:
            engine.cancel(seq)
        engine.retire()


def _num_rows(seqs: int, drafts: int, empty: int) -> int:
    return seqs + drafts * DRAFT_NODES


def _pass_time(step: Step) -> float:
    """Seconds of a step's pass; on a GPU verification waits for the pass, so it is included."""
    is_on_gpu = step.laws[0].rows.logits.is_cuda
    return step.times["forward"] + (step.times["verify"] if is_on_gpu else 0.0)


def _fitted(curve: Cost, seconds: dict[Round, float], shared: float, seqs: int) -> Cost:
    """The curve with overheads fitted to the seconds of rounds of up to `seqs` sequences.

    shared: extra seconds of a pass with `seqs` sequences, over one sequence with as many rows.
    """
    others, plain = max(seqs - 1, 1), seconds[seqs, 0, 0]
    per_seq = max(plain - seconds[1, 0, 0], 0.0) / others
    per_draft = COLD_FACTOR * max(seconds[seqs, seqs, 0] - seconds[seqs, 1, 0], 0.0) / others
    per_empty_draft = max(seconds[seqs, 0, seqs] - seconds[seqs, 0, 1], 0.0) / others
    return replace(
        curve,
        per_step=max(seconds[1, 0, 0] - per_seq, 0.0),
        per_seq=per_seq + max(shared, 0.0) / others,
        per_draft=per_draft,
        fixed_draft=max(COLD_FACTOR * (seconds[seqs, 1, 0] - plain) - per_draft, 0.0),
        per_empty_draft=per_empty_draft,
        fixed_empty=max(seconds[seqs, 0, 1] - plain - per_empty_draft, 0.0),
    )


def _length(target: Target) -> int:
    """Tokens of a text that leaves room for a draft."""
    return min(PREFIX_TOKENS, target.context - DRAFT_NODES - 2)


def _room(target: Target) -> int:
    """How many more sequences the target has room to measure."""
    length = _length(target)
    for seqs in range(MEASURED_SEQS if length > 0 else 0, 0, -1):
        with suppress(CapacityError):
            target.check_room(target.num_held + seqs, length + max(DRAFT_NODES, MEASURED_SEQS) + 1)
            return seqs
    return 0
