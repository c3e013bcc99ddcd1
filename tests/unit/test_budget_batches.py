"""The controller `budget` where several sequences decode at once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Many

import numpy as np
import pytest
from budgets import ALL, Dear, Free, bound, extra, one_step, together

from fakes import FakeTarget, sequence, table_law
from forerun.controllers.budget import (
    ALLOWED,
    BEGIN,
    FIRST,
    LEARNING,
    LOOK,
    REVIEW,
    SOBER,
    TOGETHER,
    Budget,
)
from forerun.core.dice import SeededDice
from forerun.core.records import Cost, Plan, Sequence, Step, Verdict
from forerun.core.roles import Drafter
from forerun.core.tree import EMPTY, chain


def test_sequences_that_draft_together_are_too_dear_where_one_is_not() -> None:
    """A draft costs a quarter of a lone step, which it may; beside fifteen others it doubles it."""
    curve = Cost((1, 65, 257), (1.0, 1.0, 1.1), per_draft=0.25)
    plans = {num: together(bound(curve), num, 2, 200) for num in (1, 16)}
    assert plans[1][-1][0].nodes >= 2
    drafts = [sum(plan.nodes > 0 for plan in step) for step in plans[16]]
    assert max(drafts[100:]) <= 1, "a probe"


SHARED = Cost((1, 257), (1.0, 2.0), drafting=1.0)  # a draft costs a step, sixteen little more


def test_sequences_begin_together_where_none_would_alone() -> None:
    """Two of a draft are accepted: 3 tokens in 2 steps alone, 18 for 16 by the first of sixteen."""
    alone, several = (together(bound(SHARED), num, 2, 60) for num in (1, 16))
    assert sum(plans[0].nodes > 0 for plans in alone) > 50
    drafts = [sum(plan.nodes > 0 for plan in plans) for plans in several]
    assert drafts[0] == 0 and drafts[1:] == [16] * 59
    plain = 16 / float(SHARED.at(16))
    few = [(16 + 2 * n) / (float(SHARED.at(16 + 2 * n)) + SHARED.aside(16, n)) for n in (4, 16)]
    assert few[0] < plain < few[1], "four of them would lose"


@pytest.mark.parametrize("hope", [(0.5, 0.8), (0.95, 0.95)])
def test_sequences_that_begin_together_in_vain_stop_and_lose_little(
    hope: tuple[float, float],
) -> None:
    """Nothing is ever accepted, whatever was hoped."""

    class Hopeful(Free):
        def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
            return hope

    budget = bound(SHARED, Hopeful())
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    spent = sum(extra(SHARED, one_step(budget, seqs, 0)) for _ in range(1000))
    assert 0 < spent < 0.02 * 1000


APART = Cost((1, 16, 257), (1.0, 10.0, 25.0))  # sixteen rows cost ten times one


@pytest.mark.parametrize(("leads", "most"), [((), 16), ((0,) * 16, 1)])
def test_samples_that_share_rows_are_cheap_without_drafts(leads: Many[int], most: int) -> None:
    """Sixteen rows more make twice the tokens: they cost a tenth of sixteen rows, and nine times
    the one that all of them share. Probes go on."""
    budget = bound(APART, nodes=1)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    drafting = [
        sum(plan.nodes > 0 for plan in one_step(budget, seqs, 1, leads=leads)) for _ in range(100)
    ]
    assert max(drafting) == most
    assert sum(drafting) == 16 * 99 if most == 16 else sum(drafting) < 30


@pytest.mark.parametrize("num_common", [0, 1, 10, 100])
def test_samples_draft_as_soon_as_they_part(num_common: int) -> None:
    """What did not pay for one row pays for sixteen, and nothing has been lost on the way."""
    budget = bound(APART, nodes=1)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    for _ in range(num_common):
        one_step(budget, seqs, 0, leads=(0,) * 16)
    drafting = [sum(plan.nodes > 0 for plan in one_step(budget, seqs, 1)) for _ in range(4)]
    assert drafting[1:] == [16] * 3


def test_a_draft_that_all_share_is_paid_once() -> None:
    """Eight rows more for sixteen times nine tokens."""
    budget = bound(APART, nodes=8)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    one_step(budget, seqs, 0, leads=(0,) * 16)
    before = budget._account
    plans, trees = [Plan(8)] * 16, [chain(range(8))] * 16
    verdicts = [Verdict(list(range(8)), 0)] * 16
    emitted = [v.tokens(t) for v, t in zip(verdicts, trees, strict=True)]
    budget.observe(Step(seqs, plans, trees, [], verdicts, emitted, leads=[0] * 16))
    assert before is not None and budget._account is not None
    saved = budget._account - before
    assert saved == pytest.approx(9 * APART.whole(1) - APART.whole(9) + ALLOWED * APART.whole(1))


def test_who_is_planned_by_others_drafts_nothing_here() -> None:
    """Sixteen run at once, and one of them asks this controller: alone it does not pay."""
    budget = bound(SHARED)
    mine, *others = (sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16))
    drafted = 0
    for _ in range(200):
        plan = budget.plan(mine)
        tree = chain(range(plan.nodes)) if plan.nodes else EMPTY
        verdicts = [Verdict(list(range(min(len(tree), 2))), 0), *([Verdict([], 0)] * 15)]
        trees = [tree, *([EMPTY] * 15)]
        emitted = [v.tokens(t) for v, t in zip(verdicts, trees, strict=True)]
        plans = [plan, *([Plan(0)] * 15)]
        budget.observe(Step([mine, *others], plans, trees, [], verdicts, emitted))
        drafted += plan.nodes > 0
    assert 0 < drafted < 20, "probes"


def test_one_that_fares_badly_rests_beside_those_that_draft() -> None:
    """Of four the first has nothing accepted: its rows are better spent on the others."""
    budget = bound(Cost((1, 257), (1.0, 30.0)))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(4)]
    steps = [one_step(budget, seqs, (0, 3, 3, 3)) for _ in range(100)]
    sizes = [[plan.nodes for plan in plans] for plans in steps]
    mean = np.mean(sizes[20:], axis=0)
    assert mean[0] < 0.2 * mean[1:].min()
    assert np.ptp(mean[1:]) == 0, "equal luck, equal drafts"


def test_drafts_that_stay_short_are_not_counted_as_long_ones() -> None:
    """Trees of two nodes, however many are allowed: rows that nobody uses cost nothing."""
    budget = bound(Cost((1, 17, 49, 257), (1.0, 1.1, 1.2, 20.0)))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    for _ in range(60):
        plans = one_step(budget, seqs, ALL, longest=2)
    assert all(plan.nodes >= 4 for plan in plans)


@pytest.mark.parametrize("num", [1, 4, 16])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_never_pays_costs_the_credit_and_a_hundredth(num: int, is_known: bool) -> None:
    """Looks in vain or rejected drafts: what is spent on them, in steps of plain decoding."""

    cost = Cost((1, 17, 65), (1.0, 1.2, 4.0), 0.0, 0.1, 0.3, 0.2, per_look=0.1, looking=0.1)
    budget = bound(cost)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(num)]
    spent = sum(extra(cost, one_step(budget, seqs, 0, is_known), is_known) for _ in range(1000))
    assert 0 < spent < TOGETHER / num + ALLOWED * 1000 + 3, "three: the last step's debt"


def test_a_batch_that_grows_and_shrinks_is_not_forgiven_each_time() -> None:
    """Between one sequence and two, every few steps; drafts never pay."""
    budget = bound(Cost((1, 17, 65), (1.0, 1.2, 4.0), per_seq=0.1, per_draft=0.1, drafting=0.2))
    cost, seqs = budget._cost, [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in (0, 1)]
    steps = (one_step(budget, seqs[: 1 + at // 3 % 2], 0) for at in range(2000))
    spent = sum(extra(cost, plans) for plans in steps)
    assert 0 < spent < TOGETHER + 2000 * (ALLOWED + 1 / SOBER)


def test_drafts_come_back_when_fewer_sequences_are_left() -> None:
    """Sixteen do not pay and rest; the last one finds at once that it does alone."""
    budget = bound(Cost((1, 65, 257), (1.0, 1.0, 1.1), per_draft=0.25))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    for _ in range(100):
        plans = one_step(budget, seqs, 2)
    assert sum(plan.nodes > 0 for plan in plans) <= 1
    for seq in seqs[1:]:
        budget.finish(seq)
    alone = [one_step(budget, seqs[:1], 2)[0] for _ in range(20)]
    assert all(plan.nodes for plan in alone[2:])


@pytest.mark.parametrize(
    ("curve", "num", "steps"),
    [
        (Cost((1, 200), (1.0, 1.0)), 1, FIRST[0]),
        (Cost((1, 200), (1.0, 1.0)), 16, TOGETHER / 16),
        (Cost((1, 2, 65), (1.0, 2.0, 65.0)), 1, FIRST[0]),
        (Cost((1, 200), (1.0, 1.0)), 2, FIRST[0]),
        (Cost((1, 200), (1.0, 1.0), looking=1.25 * LOOK), 4, TOGETHER / 4 * 0.8**2),
        (Cost((1, 200), (1.0, 1.0), per_look=LOOK / 16), 16, TOGETHER / 16),
    ],
)
def test_credit_is_shared_and_less_where_looks_of_all_are_dear(
    curve: Cost, num: int, steps: float
) -> None:
    budget = bound(curve)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(num)]
    one_step(budget, seqs, 0, is_known=False)
    left = budget._account + LEARNING[0] * curve.vain(num)  # type: ignore[operator]
    assert left / float(curve.at(num)) == pytest.approx(steps, abs=0.05)


@pytest.mark.parametrize("num", [1, 4, 16])
def test_texts_whose_looks_are_dear_are_left_alone_at_first(num: int) -> None:
    """Nothing is asked, drafted or learned until what is allowed has made up a credit."""
    drafter, target, budget = Dear(), FakeTarget(table_law(1)), Budget()
    drafter.price = 0.0
    target.cost = Cost((1, 200), (1.0, 1.0), looking=6 * LOOK)
    budget.bind(target, drafter)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(num)]
    first = min(FIRST[0], TOGETHER / num) / 36
    waits = round((6 * LOOK * BEGIN - first) / ALLOWED) - 1
    early = [plan for _ in range(waits) for plan in one_step(budget, seqs, 0)]
    assert not any(plan.nodes or plan.learns for plan in early)
    assert not drafter.asked and not drafter.hoped
    later = [plan for _ in range(5) for plan in one_step(budget, seqs, 0, is_known=False)]
    assert any(plan.nodes for plan in later), "a probe"


class Reads(Dear):
    """A draft model: reads a text before its first draft for it."""

    price = 0.3

    def __init__(self, reading: float, dear: Many[Sequence] = ()) -> None:
        super().__init__()
        self.first, self.dear, self.cheap = reading, dear, Free()

    def active_drafter(self, seq: Sequence) -> Drafter:
        return self if not self.dear or seq in self.dear else self.cheap

    def catch_up_seconds(self, seq: Sequence) -> float:
        return self.first


def decisions(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with each."""
    made, decide = list[bool](), budget._decide

    def noted(*, is_probing: bool = False) -> None:
        made.append(is_probing)
        decide(is_probing=is_probing)

    monkeypatch.setattr(budget, "_decide", noted)
    return made


@pytest.mark.parametrize("reading", [0.0, 1.0, 40.0])
def test_the_price_of_a_probe_is_saved_up_before(
    reading: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen for whom a draft costs more than it can bring: one probe, as soon as it is paid for,
    and next to no work until then."""
    budget = bound(Cost((1, 200), (1.0, 1.0)), Reads(reading))
    made = decisions(budget, monkeypatch)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    lacking = reading + REVIEW * 0.3 - min(FIRST[0], TOGETHER / 16)
    waits = round(lacking / ALLOWED)
    early = [plan for _ in range(waits - 2) for plan in one_step(budget, seqs, 0)]
    assert not any(plan.nodes for plan in early) and len(made) <= 3
    later = [one_step(budget, seqs, 0) for _ in range(10)]
    probed = [sum(plan.nodes > 0 for plan in plans) for plans in later]
    assert max(probed) == 1 and sum(map(bool, probed)) <= REVIEW, probed


@pytest.mark.parametrize("price", [0.3, 2.0])
def test_who_drafts_with_profit_goes_on_while_another_cannot_be_tried(price: float) -> None:
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(4)]
    drafter = Reads(2.0, dear=seqs[-1:])
    drafter.price = price
    budget = bound(Cost((1, 200), (1.0, 1.0)), drafter)
    steps = [one_step(budget, seqs, [3, 3, 3, 0]) for _ in range(400)]
    drafted = [all(plan.nodes for plan in plans[:3]) for plans in steps]
    assert sum(drafted) > 390
    assert any(plans[3].nodes for plans in steps), "the others have earned a probe"


def test_plans_of_a_step_that_has_begun_hold_though_a_newcomer_cannot_be_tried() -> None:
    drafter = Reads(2.0)
    budget = bound(Cost((1, 200), (1.0, 1.0)), drafter)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(3)]
    one_step(budget, seqs[:2], 0)
    budget._account = 1.0  # the price of a probe is 3.2
    budget._is_broke = False
    before = [budget.plan(seq).nodes for seq in seqs[:2]]
    budget.plan(seqs[2])
    assert not budget._is_broke and before == [budget.plan(seq).nodes for seq in seqs[:2]]


def test_where_looks_are_dear_nothing_is_forgiven_as_texts_end() -> None:
    """Sixteen begin plain, and so do the few that are left, though looks are cheaper for them."""
    budget = bound(Cost((1, 200), (1.0, 1.0), looking=6 * LOOK, per_look=0.1 * LOOK))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    for num in (16, 8, 4, 2, 1):
        for seq in seqs[num:]:
            budget.finish(seq)
        del seqs[num:]
        plans = [plan for _ in range(SOBER // 2 + 5) for plan in one_step(budget, seqs, 0)]
        assert not any(plan.nodes or plan.learns for plan in plans)


def test_credit_that_comes_after_a_lone_text_is_shared_by_those_that_run_then() -> None:
    """A step of sixteen takes as long as one; each of them has its share of a lone one's part."""
    budget = bound(Cost((1, 200), (1.0, 1.0), looking=0.1 * LOOK))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    one_step(budget, seqs[:1], 0)
    one_step(budget, seqs, 0)
    before = budget._account
    budget.finish(seqs[0])
    assert 0 < budget._account - before <= FIRST[0] / 16  # type: ignore[operator]


def test_nodes_that_others_added_are_counted_as_asked_for() -> None:
    budget = bound(Cost((1, 200), (1.0, 2.0)))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(2)]
    one_step(budget, seqs, 0)
    plans, tree = [Plan(4, 4), Plan(0)], chain(range(6))
    for _ in range(50):
        verdicts = [Verdict([0, 1], 0)] * 2
        emitted = [verdict.tokens(tree) for verdict in verdicts]
        budget.observe(Step(seqs, plans, [tree, tree], [], verdicts, emitted))
    (counts,) = budget._counts.values()
    might, had, _ = counts.counts
    assert might[4] == 0 and might[6] == had[6] > 1
    assert (counts.beliefs[1] <= 1).all()


def test_a_probe_goes_on_while_others_join() -> None:
    budget = bound(Cost((1, 2, 400), (1.0, 2.0, 400.0)))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(8)]
    for _ in range(500):
        plans = one_step(budget, seqs, 0)
    assert not any(plan.nodes for plan in plans)
    budget._account, budget._idle = 1e6, budget._pause
    one_step(budget, seqs, 0)
    probes = 0
    for k in range(REVIEW - 1):
        probes += any(plan.nodes for plan in one_step(budget, seqs, 0))
        budget._idle = 0  # else whoever joins is tried instead
        seqs.append(sequence((0, 1), 10**6, SeededDice(0), index=8 + k))
    assert probes == REVIEW - 1


def test_those_that_are_left_are_decided_anew() -> None:
    """What does not pay beside fifteen others does beside eight."""
    budget = bound(Cost((1, 10, 11, 400), (1.0, 1.0, 1.6, 60.0)))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(9)]
    for _ in range(100):
        one_step(budget, seqs, 1)
    budget._account, budget._idle = 1e4, 0
    assert sum(plan.nodes > 0 for plan in one_step(budget, seqs, 1)) <= 1, "a probe"
    for seq in seqs[5:]:
        budget.finish(seq)
    few = [one_step(budget, seqs[:5], 1) for _ in range(3)]
    assert all(plan.nodes for plan in few[-1])


@pytest.mark.parametrize("is_dear", [True, False])
def test_who_drafts_is_asked_only_when_somebody_may(is_dear: bool) -> None:
    """Where sixteen at once never draft a short answer takes a tenth of a second."""

    class Asked(Free):
        asked = 0

        def active_drafter(self, seq: Sequence) -> Drafter:
            self.asked += 1
            return self

    drafter, look = Asked(), (0.5 if is_dear else 0.1) * LOOK
    budget = bound(Cost((1, 200), (1.0, 1.0), per_look=look), drafter)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    for _ in range(2):  # the first step may fail, and be planned again
        first = [budget.plan(seq) for seq in seqs]
    assert drafter.asked == 0 and not any(plan.nodes or plan.learns for plan in first)
    ended, *others = seqs
    budget.finish(ended)
    for _ in range(8):
        plans = one_step(budget, others, 4)
    assert (drafter.asked == 0) == is_dear
    assert any(plan.nodes for plan in plans) != is_dear


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_controller_holds_no_sequence_that_has_ended_or_is_of_an_earlier_engine(
    is_given_up: bool,
) -> None:
    budget = bound(Cost((1, 200), (1.0, 1.0)))
    seq = sequence((0, 1), 10**6, SeededDice(0))
    gone = weakref.ref(seq)
    for _ in range(2):
        budget.plan(seq)
    if is_given_up:
        budget.bind(FakeTarget(table_law(1)), Free())
    else:
        budget.finish(seq)
    del seq
    assert gone() is None
