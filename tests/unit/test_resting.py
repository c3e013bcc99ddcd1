"""Drafters that are left alone for some steps: they go on from the text, and share all of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import pytest

from fakes import FakeTarget, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.budget import Budget
from forerun.controllers.fixed import Fixed
from forerun.core.cost import Cost
from forerun.core.dice import Dice, SeededDice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Controller, Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, chain
from forerun.drafters.base import PerSequence
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.engine.stats import Recorder
from forerun.verifiers.recursive import Recursive
from harness import distance

LAW = table_law(1)
GREEDY = Sampling(temperature=0)
VOCAB = 200
DRAFTERS = ["stand", "suffix", "sam", "lookahead", "token_recycling", "prompt_lookup", "auto"]


class Resting(Controller):
    """Plans while the text's length, over a period or in all, is below a number; else nothing."""

    def __init__(self, plan: Plan, below: int, period: int = 1 << 30) -> None:
        self.given, self.below, self.period = plan, below, period

    def plan(self, seq: Sequence) -> Plan:
        return self.given if len(seq.tokens) % self.period < self.below else Plan(0)


def engine(drafter: Drafter, controller: Controller, recorder: Recorder) -> Engine:
    parts = FakeTarget(LAW), SafeDrafter(drafter), Recursive(), controller
    return Engine(*parts, listeners=[recorder])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_goes_on_where_the_text_is(name: str) -> None:
    recorder = Recorder()
    loop = engine(registry.make("drafter", name), Resting(Plan(6, 4), 22, 29), recorder)
    seq = sequence((0, 1), 200, SeededDice(0), GREEDY)
    run_all(loop, [seq])
    text = [0, 1]
    while len(text) < len(seq.tokens):
        text.append(int(np.argmax(LAW(text))))
    stats = recorder.of(seq)
    assert seq.tokens == text and not loop.drafter.failures(seq)
    assert stats.accepted > 30, "the text repeats, so many drafts hold"


@pytest.mark.parametrize("name", ["auto", "suffix", "sam", "stand"])
def test_a_text_that_begins_to_repeat_late_is_drafted_soon(name: str) -> None:
    """300 tokens that nobody can tell, then the same again: drafts come back within 150 of them."""
    text = np.random.default_rng(0).integers(0, VOCAB, 300).tolist()

    def law(tokens: Many[int]) -> np.ndarray:
        found = np.full(VOCAB, 1e-6)
        found[text[len(tokens) % 300]] = 1.0
        return found / found.sum()

    target, recorder = FakeTarget(law, VOCAB), Recorder()
    target.cost = Cost((1, 65), (0.01, 0.03))
    accepted: list[int] = []  # by place in the text
    loop = Engine(
        target,
        SafeDrafter(registry.make("drafter", name)),
        Recursive(),
        Budget(),
        listeners=[recorder, lambda step: note(step, accepted)],
    )
    run_all(loop, [sequence(tuple(text[:2]), 1198, SeededDice(0), GREEDY)])
    assert len(accepted) > 1100
    assert sum(accepted[450:600]) > 30, "most of the repeat's second half is copied"
    assert sum(accepted[600:]) > 450


def note(step: Step, accepted: list[int]) -> None:
    """1 for every emitted token that was drafted, 0 for the others."""
    for verdict, emitted in zip(step.verdicts, step.emitted, strict=True):
        hits = min(len(verdict.nodes), len(emitted))
        accepted += [1] * hits + [0] * (len(emitted) - hits)


@pytest.mark.parametrize("name", ["suffix:scope=tenant", "sam:scope=tenant"])
def test_what_was_said_without_drafts_is_shared_too(name: str) -> None:
    held = []
    for below in (20, 1000):  # all of the text was drafted for, or its beginning
        drafter = registry.make("drafter", name)
        loop = engine(drafter, Resting(Plan(6, 4), below), Recorder())
        run_all(loop, [sequence((0, 1), 500, SeededDice(0), Sampling())])
        held.append(drafter.snapshot("").counts["tokens"])
    assert held == [502, 502]  # the prompt is part of it


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_law_is_kept_through_rests(name: str) -> None:
    make: Callable[[], Drafter] = lambda: SafeDrafter(registry.make("drafter", name))  # noqa: E731
    rests = Resting(Plan(2, 1), 3, 4)  # at every other of four places
    error = distance(LAW, make, Recursive(), plan=rests, lengths=(5,))
    assert error <= 1e-12


class Noted(PerSequence):
    """Drafts one token; notes what it is asked and shown, in order."""

    labels = frozenset({"point"})

    def __init__(self) -> None:
        self.log: list[object] = []

    def start(self, seq: Sequence) -> None:
        self.log.append("start")

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        self.log.append(f"asked at {len(seq.tokens)}")
        return chain([0])

    def observe(self, step: Step) -> None:
        self.log += [step.start(i) for i in range(len(step.seqs))]

    def finish(self, seq: Sequence) -> None:
        self.log.append("finish")


class Planned(Fixed):
    """Plans by the length of the text."""

    def __init__(self, plans: Callable[[int], Plan]) -> None:
        super().__init__()
        self.plans = plans

    def plan(self, seq: Sequence) -> Plan:
        return self.plans(len(seq.tokens))


def test_a_drafter_begins_at_its_first_use_and_is_shown_what_its_plan_says() -> None:
    """Tokens 2 and 3: nothing; 4 and 5: learns; 6 and 7: nothing; then it drafts."""
    drafter = Noted()
    nothing = Plan(0, learns=False)
    plans = {2: nothing, 3: nothing, 4: Plan(0), 5: Plan(0), 6: nothing, 7: nothing}
    rests = Planned(lambda length: plans.get(length, Plan(1, 1)))
    run_all(engine(drafter, rests, Recorder()), [sequence((0, 1), 12, SeededDice(0), GREEDY)])
    assert drafter.log[:6] == ["start", 4, 5, "asked at 8", 8, "asked at 9"] or (
        drafter.log[:5] == ["start", 4, 5, "asked at 8", 8]
    )
    assert drafter.log[-1] == "finish"


def test_a_sequence_that_neither_drafts_nor_learns_costs_nothing() -> None:
    drafter = Noted()
    rests = Planned(lambda length: Plan(0, learns=False))
    run_all(engine(drafter, rests, Recorder()), [sequence((0, 1), 12, SeededDice(0), GREEDY)])
    assert drafter.log == []


def test_a_drafter_that_needs_rows_is_shown_every_step() -> None:
    drafter = Noted()
    drafter.needs = frozenset({"hidden"})
    rests = Planned(lambda length: Plan(0, learns=False))
    run_all(engine(drafter, rests, Recorder()), [sequence((0, 1), 6, SeededDice(0), GREEDY)])
    assert drafter.log == ["start", *range(2, 8), "finish"]
