"""What is derived from a step, and from a part of it."""

from __future__ import annotations

from dataclasses import replace

from fakes import sequence
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Step, Verdict
from forerun.core.tree import EMPTY, Tree, chain


def step(trees: list[Tree], leads: list[int]) -> Step:
    seqs = [sequence([0, 1], 9, SeededDice(i)) for i in range(len(trees))]
    verdicts = [Verdict([], 2)] * len(trees)
    laws = [None] * len(trees)
    plans, emitted = [Plan(2)] * len(trees), [[2]] * len(trees)
    return Step(seqs, plans, trees, laws, verdicts, emitted, leads=leads)  # type: ignore[arg-type]


def test_rows_that_several_have_count_once() -> None:
    two, three = chain([1, 2]), chain([1, 2, 1])
    found = step([two, two, EMPTY, three, EMPTY, three], [0, 0, 0, 3, 4, 3])
    assert (found.num_common, found.num_nodes) == (3, 2 + 3)
    assert (step([two, two], []).num_common, step([two, two], []).num_nodes) == (0, 4)


def test_a_part_of_a_step_has_rows_of_its_own() -> None:
    """Whose rows a sequence took hangs on who else was there."""
    whole = step([chain([1, 2]), chain([1, 2]), EMPTY, EMPTY], [0, 0, 0, 3])
    for rows, nodes in (([1], 2), ([0, 1], 4), ([1, 2], 2), ([0, 1, 2, 3], 4)):
        part = whole.select(rows)
        assert (len(part.seqs), part.num_common, part.num_nodes) == (len(rows), 0, nodes)


def test_a_plan_of_another_size_or_depth_keeps_all_else() -> None:
    plan = Plan(5, 7, lambda q, token: True, 0.25, learns=False)
    assert plan.sized(3) == replace(plan, nodes=3)
    assert plan.within(2) == replace(plan, depth=2) and plan.within(-1) == replace(plan, depth=0)
    assert plan.within(7) is plan
