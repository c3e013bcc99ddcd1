"""The cost of a pass, and the controller that draws the bill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fakes import FakeTarget, sequence, table_law
from forerun.controllers.budget import PATIENCE, Budget
from forerun.dice import SeededDice
from forerun.engine import cost
from forerun.engine.cost import cost_of, measure
from forerun.errors import ConfigError
from forerun.records import Cost, Plan, Step, Verdict
from forerun.roles import Drafter
from forerun.tree import EMPTY, Tree, chain

FLAT = Cost((1, 9, 65), (1.0, 1.0, 8.0))
STEEP = Cost((1, 2, 65), (1.0, 2.0, 65.0))


class Free(Drafter):
    def seconds(self, nodes: int) -> float:
        return 0.0


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


def test_a_cost_is_read_between_and_beyond_its_points() -> None:
    assert FLAT.at(5) == 1.0 and FLAT.at(37) == 4.5
    assert FLAT.at(73) == pytest.approx(9.0)
    assert FLAT.at(np.array([1, 65])).tolist() == [1.0, 8.0]


def test_drafts_that_are_accepted_grow_up_to_where_passes_get_dear() -> None:
    plans = steps(bound(FLAT), lambda nodes: nodes, 400)
    assert plans[-1].nodes >= 8
    few = steps(bound(FLAT), lambda nodes: 1, 400)
    assert 1 <= few[-1].nodes <= 8  # free up to nine rows


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


def test_one_that_rests_among_many_that_draft_is_probed_as_often_as_alone() -> None:
    budget = bound(Cost((1, 129, 257), (1.0, 1.1, 5.0)))
    seqs = [sequence((0, 1), 10**6, SeededDice(0), index=k) for k in range(8)]
    drafted = []  # whether the first one did, of which nothing is ever accepted
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
    class Dear(Drafter):
        def seconds(self, nodes: int) -> float:
            return 0.5 * nodes

    target = FakeTarget(table_law(1))
    target.cost = FLAT
    dear, cheap = Budget(), bound(FLAT)
    dear.bind(target, Dear())
    most = [steps(b, lambda nodes: min(nodes, 2), 300)[-1].nodes for b in (dear, cheap)]
    assert most[0] < most[1]


@pytest.mark.parametrize("options", [{"nodes": 0}, {"depth": 0}])
def test_a_budget_of_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="drafter 'none'"):
        Budget(**options)


class Shaped(FakeTarget):
    """A target whose passes can be timed."""

    shape, cost = "a fake of three tokens", None


def test_a_measured_curve_rises_and_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(cost, "SECONDS", (0.0, 0.2))
    first = cost_of(Shaped(table_law(1)))
    assert first.rows[0] == 1 and list(first.seconds) == sorted(first.seconds)
    assert first.seconds[0] > 0
    (file,) = (tmp_path / "costs").iterdir()
    assert cost_of(Shaped(table_law(1))) == first  # read, not measured again
    file.write_text("{")
    assert cost_of(Shaped(table_law(1))).rows == first.rows


def test_a_curve_of_one_gpu_does_not_serve_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(shape: str, gpu: str) -> str:
        target = Shaped(table_law(1))
        target.shape = shape
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
        return cost._key(target)

    assert key("a model on cuda:0", "H200") != key("a model on cuda:0", "A10")
    assert key("a model on cpu", "H200") == key("a model on cpu", "A10")


def test_a_folder_that_cannot_be_written_costs_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cost, "SECONDS", (0.0, 0.1))
    assert cost_of(Shaped(table_law(1))).rows


def test_measuring_leaves_no_sequence_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "SECONDS", (0.0, 0.1))
    released = []

    class Target(FakeTarget):
        def release(self, seq) -> None:
            released.append(seq)

    measure(Target(table_law(1)))
    assert len(released) == 1


def test_trees_of_the_measurement_have_the_wanted_size() -> None:
    for nodes in (0, 1, 6, 64):
        tree: Tree = cost._bush(nodes, 3)
        assert len(tree) == nodes
        assert tree.tokens.max(initial=0) < 3
