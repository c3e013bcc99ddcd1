"""Plans of the controller `budget`: where drafting pays, what it may lose, when it comes back."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import pytest
from budgets import ALL, Free, bound, extra, one_step, together

from fakes import FakeTarget, sequence, table_law
from forerun.controllers import budget as budget_module
from forerun.controllers.budget import (
    CREDIT_STEPS,
    LEARN_PRICE,
    MAX_CREDIT_STEPS,
    PROBE_SHARE,
    PROBE_SIZE,
    Budget,
)
from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step, Verdict
from forerun.core.roles import Drafter
from forerun.core.tree import EMPTY, chain
from forerun.errors import ConfigError

FLAT = Cost((1, 9, 65), (1.0, 1.0, 8.0))
STEEP = Cost((1, 2, 65), (1.0, 2.0, 65.0))
COSTLY = Cost((1, 257), (1.0, 60.0), per_draft=0.1, per_empty_draft=0.05, fixed_empty=0.2)
SHARED = Cost((1, 16, 257), (1.0, 10.0, 25.0))  # sixteen rows cost ten times one


def texts(num: int) -> list[Sequence]:
    return [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(num)]


def steps(budget: Budget, accepted: int, count: int) -> list[Plan]:
    """Plans of a lone sequence; so many nodes of each draft are accepted."""
    return [plans[0] for plans in together(budget, 1, accepted, count)]


def test_drafts_grow_while_further_nodes_pay() -> None:
    assert steps(bound(FLAT), ALL, 400)[-1].nodes >= 8
    assert 1 <= steps(bound(FLAT), 1, 400)[-1].nodes <= 8, "free up to nine rows"


def test_a_jump_in_the_curve_does_not_hold_plans_below_it_for_ever() -> None:
    curve = Cost((1, 5, 6, 65), (1.0, 1.1, 1.5, 2.0))
    assert steps(bound(curve), ALL, 100)[-1].nodes > 8


@pytest.mark.parametrize("num", [1, 4, 16])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("cost", [STEEP, COSTLY])
def test_drafts_that_never_pay_lose_the_credit_and_a_share(
    cost: Cost, is_known: bool, num: int
) -> None:
    """The law of the account, whatever drafts, empty drafts and learning cost."""
    budget, seqs, count = bound(cost), texts(num), 3000
    lost = 0.0
    for _ in range(count):
        plans = one_step(budget, seqs, 0, is_known)
        learners = sum(plan.nodes <= 0 and plan.learns for plan in plans)
        learning = LEARN_PRICE * cost.per_draft * learners
        lost += extra(cost, plans, is_known)
        lost += learning / (cost.pass_time(num) + cost.overhead(num, 0))
    one_draft = extra(cost, [Plan(budget.nodes)] * num, is_known)
    assert lost <= CREDIT_STEPS + PROBE_SHARE * count + one_draft


def test_it_comes_back_when_drafts_begin_to_be_accepted() -> None:
    budget, seqs = bound(FLAT), texts(1)
    sizes = [one_step(budget, seqs, 0 if i < 1500 else ALL)[0].nodes for i in range(3000)]
    assert np.mean(sizes[-200:]) > 6


def test_empty_drafts_come_at_growing_distances_and_learning_goes_on() -> None:
    longest = 8
    budget, seqs = bound(Cost(FLAT.rows, FLAT.seconds, fixed_empty=longest * PROBE_SHARE)), texts(1)
    plans = [one_step(budget, seqs, 0, is_known=False)[0] for _ in range(30)]
    looks = np.flatnonzero([plan.nodes > 0 for plan in plans])
    assert np.diff(looks).tolist()[:5] == [1, 2, 4, 8, 8]
    assert all(plan.learns for plan in plans)
    while not budget.plan(seqs[0]).nodes:
        one_step(budget, seqs, 4)
    found = [one_step(budget, seqs, 4)[0] for _ in range(8)]
    assert all(plan.nodes > 0 for plan in found), "a draft that finds something ends the wait"


def test_a_sequence_that_fails_rests_among_those_that_draft() -> None:
    """Its probes take no more than their share of the time."""
    budget, seqs = bound(Cost((1, 129, 257), (1.0, 1.1, 5.0), per_draft=0.05)), texts(8)
    drafted = []
    one_step(budget, seqs, 0)
    for _ in range(1000):
        first, *others = one_step(budget, seqs, (0, *[6] * 7))
        drafted.append(first.nodes > 0)
        assert all(plan.nodes for plan in others), "the others never rest"
    assert 0 < sum(drafted[200:]) < 200


def test_drafts_that_saved_time_may_lose_more_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expensive chain that is accepted whole in three steps, then not at all in three."""
    drafted = {}
    for most in (CREDIT_STEPS, MAX_CREDIT_STEPS):
        monkeypatch.setattr(budget_module, "MAX_CREDIT_STEPS", most)
        budget, seqs = bound(FLAT, Priced(0.4)), texts(1)
        plans = [one_step(budget, seqs, 0 if i // 3 % 2 else ALL)[0] for i in range(600)]
        drafted[most] = sum(plan.nodes > 0 for plan in plans)
    assert drafted[MAX_CREDIT_STEPS] > 5 * drafted[CREDIT_STEPS], drafted


def test_a_probe_of_an_expensive_drafter_is_short() -> None:
    sizes = {}
    for per_node in (0.0, 0.05, 0.15, 0.5):
        budget, seqs = bound(FLAT, Priced(per_node)), texts(1)
        for _ in range(40):
            one_step(budget, seqs, ALL)
        plans = [one_step(budget, seqs, 0)[0] for _ in range(3000)]
        sizes[per_node] = min(plan.nodes for plan in plans if plan.nodes)
    assert sizes == {0.0: 4, 0.05: 4, 0.15: 1, 0.5: 1}


def test_a_threshold_comes_with_the_plan_where_rows_cost() -> None:
    assert 0 < steps(bound(Cost((1, 65), (1.0, 4.0))), 3, 300)[-1].min_acceptance < 0.3
    assert steps(bound(FLAT), 3, 300)[-1].min_acceptance == 0.0


class Priced(Free):
    def __init__(self, per_node: float) -> None:
        self.per_node = per_node

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        return self.per_node * nodes


def test_an_expensive_drafter_drafts_less() -> None:
    sizes = [steps(bound(FLAT, Priced(p)), 2, 300)[-1].nodes for p in (0.0, 0.1, np.inf)]
    assert sizes[0] > sizes[1] >= 1 and sizes[2] == 0


def test_a_drafter_that_never_drafts_is_not_priced() -> None:
    budget, target = Budget(), FakeTarget(table_law(1))
    target.cost = None
    budget.bind(target, Drafter())
    plans = steps(budget, 0, 200)
    assert not any(plan.nodes or plan.learns for plan in plans) and target.cost is None


@pytest.mark.parametrize("options", [{"nodes": 0}, {"depth": 0}])
def test_a_budget_of_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="drafter 'none'"):
        Budget(**options)


def test_a_better_prior_drafts_sooner() -> None:
    class Sure(Free):
        def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
            return 0.8, 0.9

    first = {}
    for kind in (Sure, Free):
        budget = bound(Cost((1, 17, 257), (1.0, 1.0, 4.0), per_draft=0.05), kind())
        first[kind] = one_step(budget, texts(16), 0) and one_step(budget, texts(16), 0)[0].nodes
    assert first[Sure] > first[Free]


class Turns(Free):
    """Two parts; the second drafts once `is_second` is set."""

    def __init__(self) -> None:
        self.parts: tuple[Drafter, ...] = Free(), Free()
        self.is_second = False

    def active_drafter(self, seq: Sequence) -> Drafter:
        return self.parts[self.is_second]


def test_each_drafter_is_judged_by_its_own_drafts() -> None:
    drafter = Turns()
    budget, seqs = bound(FLAT, drafter), texts(1)
    for _ in range(6):
        one_step(budget, seqs, 0)
    drafter.is_second = True
    fresh = steps(bound(FLAT), ALL, 6)
    after = [one_step(budget, seqs, ALL)[0] for _ in range(6)]
    assert max(plan.nodes for plan in after) == max(plan.nodes for plan in fresh) > PROBE_SIZE


def drafts_until_overdrawn(catch_up: float, groups: Many[object]) -> int:
    """Steps with drafts in which each costs what was not read of its text."""

    class Reads(Free):
        def catch_up_seconds(self, seq: Sequence) -> float:
            return catch_up

    budget, seqs = bound(FLAT, Reads()), texts(len(groups))
    for seq, group in zip(seqs, groups, strict=True):
        seq.group = group  # type: ignore[assignment]
    plans = [one_step(budget, seqs, 0) for _ in range(400)]
    return sum(any(plan.nodes for plan in step) for step in plans)


def test_catching_up_is_paid_once_by_the_samples_of_one_prompt() -> None:
    free, once, twice, thrice = (
        drafts_until_overdrawn(price, groups)
        for price, groups in ((0, (1, 1, 1)), (2, (1, 1, 1)), (2, (1, 1, 2)), (2, (1, 2, 3)))
    )
    assert free > once > thrice and once >= twice >= thrice


@pytest.mark.parametrize(("leads", "most"), [((), 16), ((0,) * 16, 1)])
def test_samples_that_share_rows_are_cheap_without_drafts(leads: Many[int], most: int) -> None:
    """A node for each of sixteen costs a tenth of their step, and nine times the row they share."""
    budget, seqs = bound(SHARED, nodes=1), texts(16)
    drafting = [
        sum(plan.nodes > 0 for plan in one_step(budget, seqs, 1, leads=leads)) for _ in range(100)
    ]
    assert max(drafting) == most
    assert sum(drafting) == 16 * 99 if most == 16 else sum(drafting) < 30


@pytest.mark.parametrize("num_common", [1, 10, 100])
def test_samples_draft_as_soon_as_they_part(num_common: int) -> None:
    budget, seqs = bound(SHARED, nodes=1), texts(16)
    for _ in range(num_common):
        one_step(budget, seqs, 0, leads=(0,) * 16)
    drafting = [sum(plan.nodes > 0 for plan in one_step(budget, seqs, 1)) for _ in range(4)]
    assert drafting[1:] == [16] * 3


def test_sequences_that_others_plan_count_in_the_cost_of_a_step() -> None:
    """Sixteen run and one asks this controller: alone it does not pay."""
    budget, (mine, *others) = bound(Cost((1, 16, 257), (1.0, 1.1, 200.0))), texts(16)
    drafted = 0
    for _ in range(200):
        plan = budget.plan(mine)
        trees = [chain(range(plan.nodes)) if plan.nodes else EMPTY, *[EMPTY] * 15]
        verdicts = [Verdict(list(range(min(len(trees[0]), 2))), 0), *[Verdict([], 0)] * 15]
        emitted = [v.tokens(t) for v, t in zip(verdicts, trees, strict=True)]
        plans = [plan, *[Plan(0, learns=False)] * 15]
        budget.observe(Step([mine, *others], plans, trees, [], verdicts, emitted))
        drafted += plan.nodes > 0
    assert 0 < drafted < 40, "probes"


def test_plans_depend_on_costs_and_texts_only() -> None:
    rng = np.random.default_rng(0)
    accepted = rng.integers(0, 6, (200, 3)).tolist()
    runs = []
    for _ in range(2):
        budget, seqs = bound(Cost((1, 65), (1.0, 4.0))), texts(3)
        runs.append([one_step(budget, seqs, each) for each in accepted])
    assert runs[0] == runs[1]


def test_no_sequence_is_held_after_its_end() -> None:
    budget, seqs = bound(FLAT), texts(3)
    for _ in range(10):
        one_step(budget, seqs, 2)
    for seq in seqs[:2]:
        budget.finish(seq)
    assert not any(seq in vars(budget)["_records"] for seq in seqs[:2])
    budget.bind(FakeTarget(table_law(1)), Drafter())
    assert not vars(budget)["_records"]
