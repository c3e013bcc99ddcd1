"""The controller that draws the bill."""

from __future__ import annotations

import numpy as np
import pytest
from budgets import ALL, Dear, Free, bound, one_step, together

from fakes import FakeTarget, sequence, table_law
from forerun import registry
from forerun.controllers.budget import (
    ALLOWED,
    BACK,
    CREDIT,
    FIRST,
    LOOK,
    MANY,
    PATIENCE,
    PROBE,
    VAIN,
    Budget,
)
from forerun.core.dice import SeededDice
from forerun.core.mixins import Priced
from forerun.core.records import Cost, Plan, Sequence
from forerun.core.roles import Drafter
from forerun.engine.safe_drafter import SafeDrafter
from forerun.errors import ConfigError

FLAT = Cost((1, 9, 65), (1.0, 1.0, 8.0))
STEEP = Cost((1, 2, 65), (1.0, 2.0, 65.0))


def steps(budget: Budget, accepted: int, count: int) -> list[Plan]:
    """Plans of a lone sequence; so many nodes of each draft are accepted."""
    return [plans[0] for plans in together(budget, 1, accepted, count)]


def test_drafts_that_are_accepted_grow_up_to_where_passes_get_dear() -> None:
    plans = steps(bound(FLAT), ALL, 400)
    assert plans[-1].nodes >= 8
    few = steps(bound(FLAT), 1, 400)
    assert 1 <= few[-1].nodes <= 8  # free up to nine rows


def test_a_plan_that_is_always_accepted_grows_beyond_what_was_tried() -> None:
    """A step in the curve at its fifth row does not hold plans at four nodes for ever."""
    curve = Cost((1, 5, 6, 65), (1.0, 1.1, 1.5, 2.0))
    assert steps(bound(curve), ALL, 100)[-1].nodes > 8


def test_nothing_is_drafted_where_it_does_not_pay_but_for_probes() -> None:
    plans = steps(bound(STEEP), 0, 3000)
    drafted = [plan.nodes > 0 for plan in plans]
    assert np.mean(drafted[1000:]) < 0.02
    assert any(drafted[-2 * PATIENCE[1] :])


def test_it_comes_back_when_drafts_begin_to_be_accepted() -> None:
    budget = bound(FLAT)
    seq = sequence((0, 1), 10**6, SeededDice(0))
    sizes = [one_step(budget, [seq], 0 if i < 1500 else ALL)[0].nodes for i in range(3000)]
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
        first, *others = one_step(budget, seqs, (0, *[ALL] * 7))
        drafted.append(first.nodes > 0)
        assert all(plan.nodes for plan in others), "the others never rest"
    assert 8 <= sum(drafted[200:]) < 80, "probes of four drafts, after 8, 16, 32, ... passes"


def test_a_threshold_comes_with_the_plan_where_rows_cost() -> None:
    plans = steps(bound(Cost((1, 65), (1.0, 4.0))), 3, 300)
    assert 0 < plans[-1].least < 0.3
    assert steps(bound(FLAT), 3, 300)[-1].least == 0.0


def test_a_dear_drafter_drafts_less() -> None:
    class Dear(Free):
        def draft_seconds(self, nodes: int, num: int = 1) -> float:
            return 0.5 * nodes

    target = FakeTarget(table_law(1))
    target.cost = FLAT
    dear, cheap = Budget(), bound(FLAT)
    dear.bind(target, Dear())
    most = [steps(b, 2, 300)[-1].nodes for b in (dear, cheap)]
    assert most[0] < most[1]


def test_a_drafter_of_several_is_dearer() -> None:
    """All of them learn, and somebody chooses."""
    target = FakeTarget(table_law(1))
    told = target.cost = Cost((1, 65), (1.0, 2.0), 1.0, 1.0, 0.5, 0.25, per_look=0.125, looking=0.5)
    budgets = {name: Budget() for name in ("stand", "router:parts=stand+suffix")}
    for name, budget in budgets.items():
        budget.bind(target, SafeDrafter(registry.make("drafter", name)))
    one, several = (budget._cost for budget in budgets.values())
    assert one == told
    assert several.aside(8, 0) == told.aside(8, 0), "what the engine does costs what it did"
    assert several.vain(4) == pytest.approx((1 + 2 * MANY) * told.vain(4))
    drafting = [cost.aside(8, 4) - cost.aside(8, 0) for cost in (one, several)]
    assert drafting[1] == pytest.approx((1 + 2 * MANY) * drafting[0])


def test_who_never_drafts_is_never_asked() -> None:
    """Nor is it measured what steps cost."""
    budget, target = Budget(), FakeTarget(table_law(1))
    target.cost = None
    budget.bind(target, Drafter())
    plans = steps(budget, 0, 200)
    assert not any(plan.nodes or plan.learns for plan in plans) and target.cost is None
    assert budget._account is None, "nor is an account kept"


@pytest.mark.parametrize("num", [1, 4])
def test_a_price_is_asked_for_once_as_the_first_texts_begin(num: int) -> None:
    drafter, target, budget = Dear(), FakeTarget(table_law(1)), Budget()
    target.cost = FLAT
    budget.bind(target, drafter)
    one_step(budget, [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(num)], 0)
    priced, probe = [(0, num), (1, num), (budget.nodes, num)], (PROBE, 1)
    assert drafter.asked == [*priced, probe]
    assert drafter.hoped == [num]


@pytest.mark.parametrize("options", [{"nodes": 0}, {"depth": 0}])
def test_a_budget_of_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="drafter 'none'"):
        Budget(**options)


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
    assert all(plan.learns for plan in plans[1:]), "the first step shows how many run"
    one_step(budget, seqs, 4)
    while not budget.plan(seqs[0]).nodes:
        one_step(budget, seqs, 4)
    found = [one_step(budget, seqs, 4)[0] for _ in range(8)]
    assert all(plan.nodes > 0 for plan in found), "one that finds something ends the waiting"


class Asked(Free):
    asked = 0

    def active_drafter(self, seq: Sequence) -> Drafter:
        self.asked += 1
        return self


def test_who_drafts_is_not_asked_while_all_wait() -> None:
    """Whoever is asked first hears of all steps that wait, which is dear where nobody drafts."""
    drafter = Asked()
    budget = bound(Cost(FLAT.rows, FLAT.seconds, looking=8.5 * VAIN), drafter)
    seqs = [sequence((0, 1), 10**6, SeededDice(0))]
    one_step(budget, seqs, 0, is_known=False)
    budget._account = 100.0
    told = []
    for _ in range(23):
        before = drafter.asked
        plan = one_step(budget, seqs, 0, is_known=False)[0]
        told.append((plan.nodes > 0, drafter.asked > before))
    assert set(told) == {(True, True), (False, False)}


@pytest.mark.parametrize(
    ("dear", "first", "more"), [(1.0, *FIRST[:1] * 2), (2.0, FIRST[0] / 4, FIRST[1])]
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


def test_who_hopes_for_more_drafts_sooner() -> None:
    """Sixteen whose drafts cost as much as their pass: only good ones pay."""

    class Sure(Priced):
        labels = frozenset({"point"})

        def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
            return 0.8, 0.9

    class Unsure(Sure):
        acceptance_prior = Priced.acceptance_prior

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


class Turns(Free):
    """The first part drafts for so many plans, then the second."""

    def __init__(self, first: int) -> None:
        self.parts: tuple[Drafter, ...] = Free(), Free()
        self.left = first

    def active_drafter(self, seq: Sequence) -> Drafter:
        self.left -= 1
        return self.parts[self.left < 0]


def test_each_drafter_is_judged_by_its_own_drafts() -> None:
    """What the first does in vain is not held against the second."""
    fresh = steps(bound(FLAT), ALL, 6)
    drafter = Turns(30)
    budget = bound(FLAT, drafter)
    budget._account = 1e6
    steps(budget, 0, 20)
    drafter.left = 0
    after = steps(budget, ALL, 6)
    assert max(plan.nodes for plan in after) == max(plan.nodes for plan in fresh) > PROBE


@pytest.mark.parametrize("reading", [0.0, 3.0])
def test_what_a_drafter_reads_is_on_the_account(reading: float) -> None:
    class Reads(Free):
        def catch_up_seconds(self, seq: Sequence) -> float:
            return reading

    budgets = [bound(FLAT, drafter) for drafter in (Free(), Reads())]
    seq = sequence((0, 1), 10**6, SeededDice(0))
    for budget in budgets:
        one_step(budget, [seq], 0)
        assert one_step(budget, [seq], 1)[0].nodes
    first, second = (budget._account for budget in budgets)
    assert first - second == pytest.approx(reading)  # type: ignore[operator]


def test_samples_of_one_prompt_read_it_once() -> None:
    class Reads(Free):
        def catch_up_seconds(self, seq: Sequence) -> float:
            return 0.5

    left = []
    for groups in ((1, 1, 1), (1, 1, 2), (None, None, None)):
        budget = bound(FLAT, Reads())
        seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(3)]
        for seq, group in zip(seqs, groups, strict=True):
            seq.group = group
        one_step(budget, seqs, 0)
        before = budget._account
        assert all(plan.nodes for plan in one_step(budget, seqs, 3))
        left.append(budget._account - before)  # type: ignore[operator]
    assert left[0] - left[1] == pytest.approx(0.5) and left[1] - left[2] == pytest.approx(0.5)


def test_nothing_is_priced_before_a_step_shows_how_many_run() -> None:
    """A step that failed is planned again, perhaps for another drafter."""
    drafter = Turns(1)
    drafter.parts = Dear(), Dear()
    budget = bound(FLAT, drafter)
    seq = sequence((0, 1), 10**6, SeededDice(0))
    for _ in range(2):
        assert budget.plan(seq).is_empty
    assert [part.asked for part in drafter.parts] == [[], []]


def test_a_drafter_that_says_it_takes_for_ever_drafts_nothing() -> None:
    class Never(Free):
        def draft_seconds(self, nodes: int, num: int = 1) -> float:
            return np.inf

    assert max(plan.nodes for plan in steps(bound(FLAT, Never()), ALL, 60)[20:]) <= PROBE
