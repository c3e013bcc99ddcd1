"""What a step costs: its pass (`forward.py`), and what each sequence and draft adds to that.

Rows of several sequences cost more than those of one tree: attention per sequence, and the engine's
own work. Drafters work on code and tables that a pass has made cold. Rounds of the real loop with a
real drafter, which learns from each before the next begins, show what comes beside a pass. Times of
passes are left out of that: on a machine with neighbours they scatter by more than all the rest
takes. What further sequences add within a pass is the difference of two passes over as many rows.
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
from forerun.core.dice import SeededDice
from forerun.core.records import Cost, Plan, Sequence, Step
from forerun.core.roles import Controller, Target
from forerun.core.sampling import Sampling
from forerun.engine.cost.forward import (
    SHORT,
    Limits,
    curve_of,
    fastest,
    pass_seconds,
    remembered,
    some_text,
)
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter, settle
from forerun.errors import CapacityError

SEQS, NODES = 8, 4  # sequences that run at once where others than one are measured; their drafts
REST, DRAFT = Plan(0, learns=False), Plan(NODES)
LOOK = Plan(NODES, least=2.0)  # no node is worth its row
SLOW = 0.1  # seconds of a pass over SEQS rows; the rest of a step takes less than a millisecond
COLD = 2.0  # times: a draft among plain steps, over one in rounds that take turns

Round = tuple[int, int, int]  # sequences; how many of them draft; how many look in vain


def cost_of(target: Target, limits: Limits | None = None) -> Cost:
    """What steps of a target cost: known, read from the cache folder, or measured.

    limits: seconds of each of three measurements, least and most; START unless given. Where they
    do not suffice, passes are so slow that the rest of a step does not count.
    A target that has no room for others is taken for one that serves one sequence only.
    """
    if target.cost is None:
        curve, seqs = curve_of(target, limits), _room(target)
        if seqs and curve.at(seqs) < SLOW:
            kinds, rows_of = _kinds(seqs), sorted({(1, seqs), (seqs, seqs)})
            rounds, passes = partial(_rounds, target, seqs), partial(pass_seconds, target)
            seconds = remembered(target, f"-x{seqs}", kinds, rounds, limits)
            within = remembered(target, f"-s{seqs}", rows_of, passes, limits)
            if math.isfinite(max(seconds + within)):
                beside = dict(zip(kinds, seconds, strict=True))
                curve = _fitted(curve, beside, within[-1] - within[0], seqs)
        target.cost = curve
    return target.cost


class _First(Controller):
    """The first `drafts` sequences draft, and the next `looks` look in vain."""

    drafts = looks = 0

    def plan(self, seq: Sequence) -> Plan:
        if seq.index < self.drafts:
            return DRAFT
        return LOOK if seq.index < self.drafts + self.looks else REST


def _kinds(seqs: int) -> list[Round]:
    """Who does what in the rounds that are measured."""
    some = [(num, drafts, 0) for num in sorted({1, seqs}) for drafts in sorted({0, 1, num})]
    return some + [(seqs, 0, looks) for looks in sorted({1, seqs})]


def _rounds(
    target: Target, seqs: int, kinds: Many[Round], tries: int, limits: Limits
) -> list[float]:
    """Seconds of rounds of the loop beside their passes."""
    controller, length = _First(), _length(target)
    drafter = registry.make("drafter", registry.TREE_DRAFTER)
    verifier = registry.make("verifier", registry.DEFAULT_VERIFIER)
    last = deque[Step](maxlen=1)
    safe = SafeDrafter(drafter)
    engine = Engine(target, safe, verifier, controller, listeners=[last.append], max_seqs=seqs)
    for part in (target, verifier):
        part.warm_up()
    running = [
        Sequence(text, length, Sampling(), SeededDice(i), limit=1 << 30, group=0, index=i)
        for i, text in enumerate(some_text(target, length, i) for i in range(seqs))
    ]

    def run(kind: Round) -> float:
        num, controller.drafts, controller.looks = kind
        for seq in running:
            del seq.tokens[length:]
        start = perf_counter()
        engine.round(running[:num])
        settle(safe)  # else the next round, which shortens the texts, would observe this step
        return perf_counter() - start - _within(last[0])

    try:
        for seq in running:
            engine.submit(seq)
        engine.step()  # prefill
        run((seqs, seqs, 0))  # what comes next is known from here on
        return fastest([partial(run, kind) for kind in kinds], tries, limits)
    finally:
        for seq in running:
            engine.cancel(seq)
        engine.retire()


def _within(step: Step) -> float:
    """Seconds of a step's pass. On a GPU it goes on until its rows are read, within the verifying,
    all of which is taken for the pass there."""
    is_asked = step.laws[0].rows.logits.is_cuda
    return step.times["forward"] + (step.times["verify"] if is_asked else 0.0)


def _fitted(curve: Cost, beside: dict[Round, float], shared: float, seqs: int) -> Cost:
    """A curve with what rounds of `seqs` sequences take beside their passes, taken apart.

    shared: seconds that a pass over as many rows takes longer where so many sequences share it.
    """
    others, plain = max(seqs - 1, 1), beside[seqs, 0, 0]
    per_seq = max(plain - beside[1, 0, 0], 0.0) / others
    per_draft = COLD * max(beside[seqs, seqs, 0] - beside[seqs, 1, 0], 0.0) / others
    per_look = max(beside[seqs, 0, seqs] - beside[seqs, 0, 1], 0.0) / others
    return replace(
        curve,
        per_step=max(beside[1, 0, 0] - per_seq, 0.0),
        per_seq=per_seq + max(shared, 0.0) / others,
        per_draft=per_draft,
        drafting=max(COLD * (beside[seqs, 1, 0] - plain) - per_draft, 0.0),
        per_look=per_look,
        looking=max(beside[seqs, 0, 1] - plain - per_look, 0.0),
    )


def _length(target: Target) -> int:
    """Tokens of a text behind which a draft has room."""
    return min(SHORT, target.context - NODES - 2)


def _room(target: Target) -> int:
    """How many sequences beside those that it holds may be measured."""
    length = _length(target)
    for seqs in range(SEQS if length > 0 else 0, 0, -1):
        with suppress(CapacityError):
            target.check_room(target.num_held + seqs, length + max(NODES, SEQS) + 1)
            return seqs
    return 0
