"""Drafters that are left alone for some steps: they go on from the text, and share all of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import pytest

from fakes import FakeTarget, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.budget import Budget
from forerun.core.dice import Dice, SeededDice
from forerun.core.logits import Laws
from forerun.core.records import Cost, Plan, Sequence, Step, Verdict
from forerun.core.roles import Controller, Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Tree, chain
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import LATE, Guarded
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
    parts = FakeTarget(LAW), Guarded(drafter), Recursive(), controller
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
    assert seq.tokens == text and not loop.drafter.failures
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
        Guarded(registry.make("drafter", name)),
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
    make: Callable[[], Drafter] = lambda: Guarded(registry.make("drafter", name))  # noqa: E731
    rests = Resting(Plan(2, 1), 3, 4)  # at every other of four places
    error = distance(LAW, make, Recursive(), plan=rests, lengths=(5,))
    assert error <= 1e-12


class Patient(Drafter):
    """Drafts one token, hears late; notes what it is asked and told, in order."""

    labels = frozenset({"point"})
    is_patient = True

    def __init__(self) -> None:
        self.log: list[object] = []

    def start(self, seq: Sequence) -> None:
        self.log.append("start")

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        self.log.append(f"asked at {len(seq.tokens)}")
        return chain([0])

    def observe(self, step: Step) -> None:
        self.log += [step.start(i) for i in range(len(step.seqs))]

    def finish(self, seq: Sequence) -> None:
        self.log.append("finish")


def test_who_is_patient_hears_late_but_before_it_drafts_and_all_in_order() -> None:
    drafter = Patient()
    # tokens 2 to 9 without drafts, then some with
    rests = Resting(Plan(1, 1), 1 << 30)
    rests.plan = lambda seq: Plan(0) if len(seq.tokens) < 10 else Plan(1, 1)  # type: ignore[method-assign]
    run_all(engine(drafter, rests, Recorder()), [sequence((0, 1), 12, SeededDice(0), GREEDY)])
    first = drafter.log.index("asked at 10")
    assert drafter.log[:first] == ["start", *range(2, 10)], "told of all before it is asked"
    assert drafter.log[-1] == "finish" and drafter.log[first + 1] == 10


def test_lessons_wait_for_some_steps_and_not_beyond_the_end() -> None:
    drafter = Patient()
    heard: list[int] = []  # lessons by step
    loop = engine(drafter, Resting(Plan(0), 1), Recorder())
    loop.listeners.append(lambda step: heard.append(len(drafter.log)))
    run_all(loop, [sequence((0, 1), 40, SeededDice(0), GREEDY)])
    assert heard[: LATE[0] - 1] == [0] * (LATE[0] - 1) and heard[LATE[0] - 1] == LATE[0] + 1
    assert drafter.log == ["start", *range(2, 42), "finish"]


@pytest.mark.parametrize("nodes, waits", [(1, False), (0, True)])
def test_who_drafts_is_told_when_all_looks_are_heard(nodes: int, waits: bool) -> None:
    """Else it would hang on who else drafted in between, and a seed on its company."""

    class Telling(Patient):
        def whose(self, seq: Sequence) -> Drafter:
            self.log.append("who?")
            return self

    drafter = Telling()
    guarded, seq = Guarded(drafter), sequence((0, 1, 0), 9, SeededDice(0))
    law = Laws(FakeTarget(LAW).forward([seq], [EMPTY], frozenset())[0], seq, EMPTY, ())
    step = Step([seq], [Plan(nodes)], [EMPTY], [law], [Verdict([], 0)], [[0]], starts=[2])
    guarded.observe(step)
    assert drafter.log == [], "it is patient"
    guarded.whose(seq)
    assert drafter.log == (["who?"] if waits else ["start", 2, "who?"])


def test_lessons_of_large_logits_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.safe_drafter.LATE", (16, 8))
    drafter = Patient()
    loop = engine(drafter, Resting(Plan(0), 1), Recorder())
    loop.submit(sequence((0, 1), 40, SeededDice(0), GREEDY))
    loop.step()
    assert drafter.log == ["start", 2]


def test_a_step_that_tells_no_places_is_heard_at_once() -> None:
    drafter = Patient()
    guarded, seq = Guarded(drafter), sequence((0, 1), 9, SeededDice(0))
    for _ in range(3):
        seq.tokens.append(0)
        guarded.observe(Step([seq], [Plan(0)], [EMPTY], [], [Verdict([], 0)], [[0]]))
    assert drafter.log == ["start", 2, 3, 4]


def test_a_memory_that_learns_late_drafts_the_same() -> None:
    texts = []
    for is_patient in (True, False):
        drafter = registry.make("drafter", "stand")
        assert drafter.is_patient
        drafter.is_patient = is_patient
        recorder = Recorder()
        loop = engine(drafter, Resting(Plan(6, 4), 22, 29), recorder)
        seqs = [sequence((0, 1), 200, SeededDice(i), index=i) for i in range(3)]
        run_all(loop, seqs)
        texts.append([(seq.tokens, recorder.of(seq).accepted) for seq in seqs])
        assert sum(accepted for _, accepted in texts[-1]) > 30
    assert texts[0] == texts[1]
