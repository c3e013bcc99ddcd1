"""What a step costs: its pass (`passes.py`), and what each sequence and draft adds to that.

Rows of several sequences cost more than those of one tree: attention per sequence, and the engine's
own work. That is measured on rounds of the real loop with given drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import replace
from functools import partial

from forerun import registry
from forerun.dice import Dice, SeededDice
from forerun.engine.guard import Guarded
from forerun.engine.loop import Engine
from forerun.errors import CapacityError
from forerun.passes import PREFIX, Limits, bush, curve_of, fastest, remembered, some_text
from forerun.records import Cost, Plan, Sequence
from forerun.roles import Controller, Drafter, Target
from forerun.sampling import Sampling
from forerun.tree import Tree

SEQS, NODES = 8, 4  # sequences that run at once where others than one are measured; their drafts

Round = tuple[int, int]  # sequences, and how many of them draft


def cost_of(target: Target) -> Cost:
    """What steps of a target cost: remembered, read from the cache folder, or measured (seconds).

    A target that has no room for others is taken for one that serves one sequence only.
    """
    if target.cost is None:
        curve, seqs = curve_of(target), _room(target)
        if seqs:
            kinds = [(n, drafts) for n in sorted({1, seqs}) for drafts in sorted({0, 1, n})]
            seconds = remembered(target, f"-{seqs}", kinds, partial(_rounds, target, seqs))
            curve = _fitted(curve, dict(zip(kinds, seconds, strict=True)), seqs)
        target.cost = curve
    return target.cost


class _Given(Drafter):
    """The same tree for all who may draft."""

    labels = frozenset({"point"})

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        return self.tree


class _First(Controller):
    """The first `drafts` sequences draft."""

    drafts = 0

    def plan(self, seq: Sequence) -> Plan:
        return Plan(NODES if seq.index < self.drafts else 0)


def _rounds(
    target: Target, seqs: int, kinds: Many[Round], tries: int, limits: Limits
) -> list[float]:
    """Seconds of rounds of the loop."""
    controller, tokens = _First(), some_text(target, _length(target))
    drafter, rule = Guarded(_Given(bush(NODES, target.vocab_size))), registry.VERIFIER
    engine = Engine(target, drafter, registry.make("verifier", rule), controller, max_seqs=seqs)
    running = [
        Sequence([*tokens], len(tokens), Sampling(), SeededDice(i), limit=1 << 30, index=i)
        for i in range(seqs)
    ]

    def run(kind: Round) -> None:
        num, controller.drafts = kind
        for seq in running:
            del seq.tokens[len(tokens) :]
        engine.round(running[:num])

    try:
        for seq in running:
            engine.submit(seq)
        engine.step()  # prefill
        return fastest([partial(run, kind) for kind in kinds], tries, limits)
    finally:
        for seq in running:
            engine.cancel(seq)
        engine.retire()


def _fitted(curve: Cost, rounds: dict[Round, float], seqs: int) -> Cost:
    """What is left of the rounds' times beside one sequence's pass."""
    left = {
        (n, drafts): seconds - float(curve.at(n + NODES * drafts))
        for (n, drafts), seconds in rounds.items()
    }
    others = max(seqs - 1, 1)
    per_seq = max(left[seqs, 0] - left[1, 0], 0.0) / others
    per_draft = max(left[seqs, seqs] - left[seqs, 1], 0.0) / others
    return replace(
        curve,
        per_step=max(left[1, 0] - per_seq, 0.0),
        per_seq=per_seq,
        per_draft=per_draft,
        drafting=max(left[seqs, 1] - left[seqs, 0] - per_draft, 0.0),
    )


def _length(target: Target) -> int:
    """Tokens of a text behind which a draft has room."""
    return min(PREFIX, target.context - NODES - 2)


def _room(target: Target) -> int:
    """How many sequences beside those that it holds may be measured."""
    length = _length(target)
    for seqs in range(SEQS if length > 0 else 0, 0, -1):
        with suppress(CapacityError):
            target.check_room(target.num_held + seqs, length + NODES + 1)
            return seqs
    return 0
