"""The time of a step: its forward pass (`forward.py`) plus overhead per sequence and draft.

The overhead is measured in rounds of the engine loop with a real drafter, as the step time minus
the pass time. The extra pass time of several sequences is the difference of two passes with the
same number of rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter

from forerun import registry
from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Controller, Target
from forerun.core.sampling import Sampling
from forerun.engine.cost.forward import (
    SHORT_PREFIX_TOKENS,
    Limits,
    cached_seconds,
    curve_of,
    dummy_tokens,
    min_seconds,
    pass_seconds,
)
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter, observe_pending
from forerun.errors import CapacityError

MEASURED_SEQS, DRAFT_NODES = 8, 4  # concurrent sequences, and nodes of each draft
PLAIN_PLAN, DRAFT_PLAN = Plan(0, learns=False), Plan(DRAFT_NODES)
EMPTY_PLAN = Plan(DRAFT_NODES, min_acceptance=2.0)  # no node qualifies, so the draft is empty
MAX_PASS_SECONDS = 0.1  # over MEASURED_SEQS rows; above it the overhead is negligible
COLD_FACTOR = 2.0  # time of a draft between plain steps over that in measured rounds: cold caches

Round = tuple[int, int, int]  # number of sequences, of drafts, of empty drafts


def cost_of(target: Target, limits: Limits | None = None) -> Cost:
    """The step costs of a target: already set, read from the cache, or measured.

    limits: min and max seconds of each of three measurements; default START_SECONDS. If they do
    not suffice, the overhead is taken as 0.
    """
    if target.cost is None:
        curve, seqs = curve_of(target, limits), _room(target)
        if seqs and curve.at(seqs) < MAX_PASS_SECONDS:
            kinds, rows_of = _kinds(seqs), sorted({(1, seqs), (seqs, seqs)})
            rounds, passes = partial(_rounds, target, seqs), partial(pass_seconds, target)
            seconds = cached_seconds(target, f"-x{seqs}", kinds, rounds, limits)
            within = cached_seconds(target, f"-s{seqs}", rows_of, passes, limits)
            if math.isfinite(max(seconds + within)):
                overhead = dict(zip(kinds, seconds, strict=True))
                curve = _fitted(curve, overhead, within[-1] - within[0], seqs)
        target.cost = curve
    return target.cost


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
    """Seconds of rounds of the engine loop without their passes."""
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
        return min_seconds([partial(run, kind) for kind in kinds], tries, limits)
    finally:
        for seq in running:
            engine.cancel(seq)
        engine.retire()


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
    return min(SHORT_PREFIX_TOKENS, target.context - DRAFT_NODES - 2)


def _room(target: Target) -> int:
    """How many more sequences the target has room to measure."""
    length = _length(target)
    for seqs in range(MEASURED_SEQS if length > 0 else 0, 0, -1):
        with suppress(CapacityError):
            target.check_room(target.num_held + seqs, length + max(DRAFT_NODES, MEASURED_SEQS) + 1)
            return seqs
    return 0
