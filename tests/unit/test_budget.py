"""The controller that draws the bill."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import pytest

from fakes import FakeTarget, sequence, table_law
from forerun import registry
from forerun.controllers.budget import (
    ALLOWED,
    BACK,
    BEGIN,
    CREDIT,
    FIRST,
    LEARNING,
    LOOK,
    MANY,
    PATIENCE,
    PROBE,
    SOBER,
    VAIN,
    Budget,
)
from forerun.dice import SeededDice
from forerun.engine.guard import Guarded
from forerun.errors import ConfigError
from forerun.records import Cost, Plan, Sequence, Step, Verdict
from forerun.roles import Drafter
from forerun.tree import EMPTY, chain

FLAT = Cost((1, 9, 65), (1.0, 1.0, 8.0))
STEEP = Cost((1, 2, 65), (1.0, 2.0, 65.0))


class Free(Drafter):
    labels = frozenset({"point"})


def bound(curve: Cost, **options: int) -> Budget:
    target = FakeTarget(table_law(1))
    target.cost = curve
    budget = Budget(**options)
    budget.bind(target, Free())
    return budget


def steps(budget: Budget, accepted, count: int, tokens: int = 40) -> list[Plan]:
    """Runs a sequence whose drafts are chains; `accepted(nodes)` of them are accepted."""
    seq, plans = sequence((0, 1), 10**6, SeededDice(0)), []
    for _ in range(count):
        plan = budget.plan(seq)
        tree = chain(range(plan.nodes)) if plan.nodes else EMPTY
        kept = min(len(tree), accepted(len(tree)))
        verdict = Verdict(list(range(kept)), 0)
        emitted = [verdict.tokens(tree)]
        budget.observe(Step([seq], [plan], [tree], [], [verdict], emitted))
        plans.append(plan)
    return plans


def test_drafts_that_are_accepted_grow_up_to_where_passes_get_dear() -> None:
    plans = steps(bound(FLAT), lambda nodes: nodes, 400)
    assert plans[-1].nodes >= 8
    few = steps(bound(FLAT), lambda nodes: 1, 400)
    assert 1 <= few[-1].nodes <= 8  # free up to nine rows


def test_a_plan_that_is_always_accepted_grows_beyond_what_was_tried() -> None:
    """A step in the curve at its fifth row does not hold plans at four nodes for ever."""
    curve = Cost((1, 5, 6, 65), (1.0, 1.1, 1.5, 2.0))
    assert steps(bound(curve), lambda nodes: nodes, 100)[-1].nodes > 8


def test_nothing_is_drafted_where_it_does_not_pay_but_for_probes() -> None:
    plans = steps(bound(STEEP), lambda nodes: 0, 3000)
    drafted = [plan.nodes > 0 for plan in plans]
    assert np.mean(drafted[1000:]) < 0.02
    assert any(drafted[-2 * PATIENCE[1] :])


def test_it_comes_back_when_drafts_begin_to_be_accepted() -> None:
    budget = bound(FLAT)
    luck = {"accepted": 0}
    seq = sequence((0, 1), 10**6, SeededDice(0))
    sizes = []
    for i in range(3000):
        luck["accepted"] = 0 if i < 1500 else 99
        plan = budget.plan(seq)
        tree = chain(range(plan.nodes)) if plan.nodes else EMPTY
        verdict = Verdict(list(range(min(len(tree), luck["accepted"]))), 0)
        budget.observe(Step([seq], [plan], [tree], [], [verdict], [verdict.tokens(tree)]))
        sizes.append(plan.nodes)
    assert np.mean(sizes[-200:]) > 6


def test_a_text_that_begins_is_tried_though_others_rested_for_long() -> None:
    budget, (old, new) = bound(FLAT), (sequence((0, 1), 10**6, SeededDice(i)) for i in range(2))
    for _ in range(1500):
        one_step(budget, [old], 0)
    assert budget._pause == PATIENCE[1]
    budget._account = 100.0
    budget._idle = 0  # just after a probe
    assert not any(one_step(budget, [old], 0)[0].nodes for _ in range(PATIENCE[0]))
    first = [one_step(budget, [new], PROBE)[0] for _ in range(8)]
    assert all(plan.nodes for plan in first[:2])


def test_thousands_of_looks_in_vain_are_borne() -> None:
    """So cheap that none has to wait for the next one."""
    budget, seq = bound(FLAT), sequence((0, 1), 10**6, SeededDice(0))
    plans = [one_step(budget, [seq], 0, is_known=False)[0] for _ in range(3000)]
    assert sum(plan.nodes > 0 for plan in plans) > 1100


def test_a_debt_is_paid_back_by_what_is_allowed() -> None:
    """While the account is overdrawn nothing is drafted or learned; then drafts come back."""
    budget = bound(Cost((1, 65), (1.0, 65.0)))
    seqs = [sequence((0, 1), 10**6, SeededDice(0))]
    one_step(budget, seqs, 0)
    budget._account, budget._is_broke, owed = -0.5, True, BACK + 0.5
    plans = [one_step(budget, seqs, 0)[0] for _ in range(300)]
    active = [plan.nodes > 0 or plan.learns for plan in plans]
    assert active.index(True) == pytest.approx(owed / ALLOWED, abs=2)


def test_sixteen_that_begin_at_once_are_decided_once() -> None:
    budget = bound(Cost((1, 1000), (1.0, 1.0)))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    one_step(budget, seqs, 4)
    plans = [budget.plan(seq) for seq in seqs]
    assert plans[0].nodes and len(set(map(id, plans))) == 1


def test_one_that_rests_among_many_that_draft_is_probed_as_often_as_alone() -> None:
    budget = bound(Cost((1, 129, 257), (1.0, 1.1, 5.0)))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(8)]
    drafted = []  # whether the first one did, of which nothing is ever accepted
    one_step(budget, seqs, 0)
    for _ in range(1000):
        plans = [budget.plan(seq) for seq in seqs]
        trees = [chain(range(plan.nodes)) if plan.nodes else EMPTY for plan in plans]
        counts = [0, *map(len, trees[1:])]
        verdicts = [Verdict(list(range(count)), 0) for count in counts]
        emitted = [v.tokens(tree) for v, tree in zip(verdicts, trees, strict=True)]
        budget.observe(Step(seqs, plans, trees, [], verdicts, emitted))
        drafted.append(len(trees[0]) > 0)
        assert all(map(len, trees[1:])), "the others never rest"
    assert 8 <= sum(drafted[200:]) < 80, "probes of four drafts, after 32, 64, 128, ... passes"


def test_a_threshold_comes_with_the_plan_where_rows_cost() -> None:
    plans = steps(bound(Cost((1, 65), (1.0, 4.0))), lambda nodes: min(nodes, 3), 300)
    assert 0 < plans[-1].least < 0.3
    assert steps(bound(FLAT), lambda nodes: min(nodes, 3), 300)[-1].least == 0.0


def test_a_dear_drafter_drafts_less() -> None:
    class Dear(Free):
        def seconds(self, nodes: int, num: int = 1, seqs: Many[Sequence] = ()) -> float:
            return 0.5 * nodes

    target = FakeTarget(table_law(1))
    target.cost = FLAT
    dear, cheap = Budget(), bound(FLAT)
    dear.bind(target, Dear())
    most = [steps(b, lambda nodes: min(nodes, 2), 300)[-1].nodes for b in (dear, cheap)]
    assert most[0] < most[1]


def test_a_drafter_of_several_is_dearer() -> None:
    """All of them learn, and somebody chooses."""
    target = FakeTarget(table_law(1))
    told = target.cost = Cost((1, 65), (1.0, 2.0), 1.0, 1.0, 0.5, 0.25, per_look=0.125, looking=0.5)
    budgets = {name: Budget() for name in ("stand", "router:parts=stand+suffix")}
    for name, budget in budgets.items():
        budget.bind(target, Guarded(registry.make("drafter", name)))
    one, several = (budget._cost for budget in budgets.values())
    assert one == told
    assert several.aside(8, 0) == told.aside(8, 0), "what the engine does costs what it did"
    assert several.vain(4) == pytest.approx((1 + 2 * MANY) * told.vain(4))
    drafting = [cost.aside(8, 4) - cost.aside(8, 0) for cost in (one, several)]
    assert drafting[1] == pytest.approx((1 + 2 * MANY) * drafting[0])


def test_who_never_drafts_is_never_asked() -> None:
    budget, target = Budget(), FakeTarget(table_law(1))
    budget.bind(target, Drafter())
    plans = steps(budget, lambda nodes: 0, 200)
    assert not any(plan.nodes or plan.learns for plan in plans)
    assert budget._account is None, "nor is an account kept"


class Dear(Drafter):
    """Any draft costs as much as ten steps; counts how often that is asked."""

    labels = frozenset({"point"})

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # nodes, sequences
        self.hoped: list[int] = []

    def seconds(self, nodes: int, num: int = 1, seqs: Many[Sequence] = ()) -> float:
        self.asked.append((nodes, num))
        return 10.0

    def hope(self, num: int = 1) -> tuple[float, float]:
        self.hoped.append(num)
        return super().hope(num)


@pytest.mark.parametrize("num", [1, 4])
def test_a_price_is_asked_for_once_as_the_first_texts_begin(num: int) -> None:
    drafter, target, budget = Dear(), FakeTarget(table_law(1)), Budget()
    target.cost = FLAT
    budget.bind(target, drafter)
    one_step(budget, [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(num)], 0)
    assert drafter.asked == [(0, num), (1, num), (budget.nodes, num)]
    assert drafter.hoped == [1, num]


@pytest.mark.parametrize("options", [{"nodes": 0}, {"depth": 0}])
def test_a_budget_of_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="drafter 'none'"):
        Budget(**options)


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
    budget = bound(SHARED)
    budget._ask_hope = lambda num: hope
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    spent, plain = 0.0, float(SHARED.at(16))
    for _ in range(1000):
        plans = one_step(budget, seqs, 0)
        rows = 16 + sum(plan.nodes for plan in plans)
        drafts = sum(plan.nodes > 0 for plan in plans)
        spent += (float(SHARED.at(rows)) + SHARED.aside(16, drafts)) / plain - 1
    assert 0 < spent < 0.02 * 1000


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
    sizes = []
    for _ in range(100):
        plans = [budget.plan(seq) for seq in seqs]
        trees = [chain(range(plan.nodes)) if plan.nodes else EMPTY for plan in plans]
        counts = [0, *(min(len(tree), 3) for tree in trees[1:])]
        verdicts = [Verdict(list(range(count)), 0) for count in counts]
        emitted = [v.tokens(tree) for v, tree in zip(verdicts, trees, strict=True)]
        budget.observe(Step(seqs, plans, trees, [], verdicts, emitted))
        sizes.append([plan.nodes for plan in plans])
    mean = np.mean(sizes[20:], axis=0)
    assert mean[0] < 0.2 * mean[1:].min()
    assert np.ptp(mean[1:]) == 0, "equal luck, equal drafts"


def test_drafts_that_stay_short_are_not_counted_as_long_ones() -> None:
    """Trees of two nodes, however many are allowed: rows that nobody uses cost nothing."""
    budget = bound(Cost((1, 17, 49, 257), (1.0, 1.1, 1.2, 20.0)))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    for _ in range(60):
        plans = [budget.plan(seq) for seq in seqs]
        trees = [chain(range(min(plan.nodes, 2))) if plan.nodes else EMPTY for plan in plans]
        verdicts = [Verdict(list(range(len(tree))), 0) for tree in trees]
        emitted = [v.tokens(tree) for v, tree in zip(verdicts, trees, strict=True)]
        budget.observe(Step(seqs, plans, trees, [], verdicts, emitted))
    assert all(plan.nodes >= 4 for plan in plans)


def together(budget: Budget, num: int, accepted: int, count: int) -> list[list[Plan]]:
    """Plans of `num` sequences that draft at once; so many nodes of each draft are accepted."""
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(num)]
    found = []
    for _ in range(count):
        found.append(one_step(budget, seqs, accepted))
    return found


def one_step(budget: Budget, seqs: list, accepted: int, is_known: bool = True) -> list[Plan]:
    """A step in which all who may draft do, unless nothing is known of the text."""
    plans = [budget.plan(seq) for seq in seqs]
    trees = [chain(range(plan.nodes)) if plan.nodes and is_known else EMPTY for plan in plans]
    verdicts = [Verdict(list(range(min(len(tree), accepted))), 0) for tree in trees]
    emitted = [verdict.tokens(tree) for verdict, tree in zip(verdicts, trees, strict=True)]
    budget.observe(Step(seqs, plans, trees, [], verdicts, emitted))
    return plans


@pytest.mark.parametrize("num", [1, 4, 16])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_never_pays_costs_the_credit_and_a_hundredth(num: int, is_known: bool) -> None:
    """Looks in vain or rejected drafts: what is spent on them, in steps of plain decoding."""

    cost = Cost((1, 17, 65), (1.0, 1.2, 4.0), 0.0, 0.1, 0.3, 0.2, per_look=0.1, looking=0.1)
    budget = bound(cost)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(num)]
    spent, plain = 0.0, float(cost.at(num)) + cost.aside(num, 0)
    for _ in range(1000):
        plans = one_step(budget, seqs, 0, is_known)
        drafts = sum(plan.nodes > 0 for plan in plans)
        rows = num + is_known * sum(plan.nodes for plan in plans)
        aside = cost.aside(num, drafts * is_known, drafts * (not is_known))
        spent += float(cost.at(rows)) + aside - plain
    assert 0 < spent < (CREDIT / num + ALLOWED * 1000 + 3) * plain, "three: the last step's debt"


def test_a_batch_that_grows_and_shrinks_is_not_forgiven_each_time() -> None:
    """Between one sequence and two, every few steps; drafts never pay."""
    budget = bound(Cost((1, 17, 65), (1.0, 1.2, 4.0), per_seq=0.1, per_draft=0.1, drafting=0.2))
    cost, seqs = budget._cost, [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in (0, 1)]
    spent = 0.0
    for at in range(2000):
        now = seqs[: 1 + at // 3 % 2]
        plans = one_step(budget, now, 0)
        drafts = sum(plan.nodes > 0 for plan in plans)
        rows = len(now) + sum(plan.nodes for plan in plans)
        extra = float(cost.at(rows)) + cost.aside(len(now), drafts)
        spent += extra / (float(cost.at(len(now))) + cost.aside(len(now), 0)) - 1
    assert 0 < spent < CREDIT + 2000 * (ALLOWED + 1 / SOBER)


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


@pytest.mark.parametrize("longest", [4, 8])
def test_looks_in_vain_come_at_growing_distances_and_learning_goes_on(longest: int) -> None:
    """Up to where they take their share of the time: the dearer they are, the farther apart."""
    budget = bound(Cost(FLAT.rows, FLAT.seconds, looking=(longest + 0.5) * VAIN))
    seqs = [sequence((0, 1), 10**6, SeededDice(0))]
    plans = one_step(budget, seqs, 0, is_known=False)
    budget._account = 100.0
    plans += [one_step(budget, seqs, 0, is_known=False)[0] for _ in range(23)]
    looks = np.flatnonzero([plan.nodes > 0 for plan in plans])
    distances = [min(2**i, longest) for i in range(24)]
    assert len(looks) > 4 and np.diff(looks).tolist() == distances[: len(looks) - 1]
    assert all(plan.learns for plan in plans)
    one_step(budget, seqs, 4)
    while not budget.plan(seqs[0]).nodes:
        one_step(budget, seqs, 4)
    found = [one_step(budget, seqs, 4)[0] for _ in range(8)]
    assert all(plan.nodes > 0 for plan in found), "one that finds something ends the waiting"


@pytest.mark.parametrize(
    ("curve", "num", "steps"),
    [
        (Cost((1, 200), (1.0, 1.0)), 1, FIRST[0]),
        (Cost((1, 200), (1.0, 1.0)), 16, CREDIT / 16),
        (Cost((1, 2, 65), (1.0, 2.0, 65.0)), 1, FIRST[0]),
        (Cost((1, 200), (1.0, 1.0)), 2, FIRST[0]),
        (Cost((1, 200), (1.0, 1.0), looking=1.25 * LOOK), 4, FIRST[0] * 0.8**3),
        (Cost((1, 200), (1.0, 1.0), per_look=LOOK / 16), 16, CREDIT / 16),
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


@pytest.mark.parametrize(
    ("dear", "first", "more"), [(1.0, *FIRST[:1] * 2), (2.0, FIRST[0] / 8, FIRST[1])]
)
def test_a_lone_answer_spends_a_part_of_the_credit_and_those_after_it_the_rest(
    dear: float, first: float, more: float
) -> None:
    """A short request alone loses little; samples one at a time may try what the first taught.

    dear: a look, over one that leaves all of the first part.
    """
    budget, grown = bound(Cost((1, 200), (1.0, 1.0), looking=dear * LOOK)), []
    for k in range(20):
        seq = sequence((0, 1), 10**6, SeededDice(0), index=k)
        one_step(budget, [seq], 0, is_known=False)
        before = budget._account
        budget.finish(seq)
        grown.append(budget._account - before)  # type: ignore[operator]
    assert grown[:3] == pytest.approx([more] * 3)
    assert first + sum(grown) == pytest.approx(CREDIT)


@pytest.mark.parametrize("num", [1, 4, 16])
def test_texts_whose_looks_are_dear_are_left_alone_at_first(num: int) -> None:
    """Nothing is asked, drafted or learned until what is allowed has made up a credit."""
    drafter, target, budget = Dear(), FakeTarget(table_law(1)), Budget()
    target.cost = Cost((1, 200), (1.0, 1.0), looking=3 * LOOK)
    budget.bind(target, drafter)
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(num)]
    first = min(FIRST[0], CREDIT / num) / 27
    waits = round((3 * LOOK * BEGIN - first) / ALLOWED) - 1
    early = [plan for _ in range(waits) for plan in one_step(budget, seqs, 0)]
    assert not any(plan.nodes or plan.learns for plan in early)
    assert not drafter.asked and not drafter.hoped
    later = [plan for _ in range(5) for plan in one_step(budget, seqs, 0, is_known=False)]
    assert any(plan.nodes for plan in later), "a probe"


def test_where_looks_are_dear_nothing_is_forgiven_as_texts_end() -> None:
    """Sixteen begin plain, and so do the few that are left, though looks are cheaper for them."""
    budget = bound(Cost((1, 200), (1.0, 1.0), looking=2 * LOOK, per_look=0.1 * LOOK))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
    for num in (16, 8, 4, 2, 1):
        for seq in seqs[num:]:
            budget.finish(seq)
        del seqs[num:]
        plans = [plan for _ in range(SOBER // 2 + 5) for plan in one_step(budget, seqs, 0)]
        assert not any(plan.nodes or plan.learns for plan in plans)


def test_who_hopes_for_more_drafts_sooner() -> None:
    """Sixteen whose drafts cost as much as their pass: only good ones pay."""

    class Sure(Drafter):
        labels = frozenset({"point"})

        def hope(self, num: int = 1) -> tuple[float, float]:
            return 0.8, 0.9

    class Unsure(Sure):
        hope = Drafter.hope

    first = {}
    for kind in (Sure, Unsure):
        target = FakeTarget(table_law(1))
        target.cost = Cost((1, 17, 257), (1.0, 1.0, 4.0), per_draft=0.05)
        budget = Budget()
        budget.bind(target, kind())
        seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(16)]
        one_step(budget, seqs, 0, is_known=False)  # prices are asked for
        budget._account, budget._wait = 100.0, 0
        late = sequence((0, 1), 10**6, SeededDice(0), index=16)
        first[kind] = budget.plan(late).nodes
    assert first[Sure] > first[Unsure]
