"""What the ablations of STAND replace is really replaced."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from fakes import FakeTarget, run_all, sequence, table_law
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.drafters.stand import Stand
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.verifiers.recursive import Recursive

FOLDER = Path(__file__).parents[2] / "benchmarks"


def most_seen(drafter: Stand) -> int:
    """How many laws a context stands for at most, after 40 tokens of a vocabulary of three."""
    seen: list[int] = []
    parts = FakeTarget(table_law(1)), SafeDrafter(drafter), Recursive(), Fixed(nodes=0)
    loop = Engine(*parts)
    loop.listeners.append(lambda step: seen.append(drafter.memory(step.seqs[0]).table.counts.max()))
    run_all(loop, [sequence((0, 1), 40, SeededDice(0))])
    return max(seen)


@pytest.mark.slow
def test_who_overwrites_holds_one_law_of_each_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    latest = importlib.import_module("stand").latest(None)
    assert most_seen(Stand()) > 5 and most_seen(latest) == 1


def test_methods_of_a_pair_meet_the_same_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem is decoded by all methods in one way before the next way begins."""
    monkeypatch.syspath_prepend(FOLDER)
    units = [*importlib.import_module("stand").units("table", ["plain", "STAND"], 2)]
    for one, other in zip(units[::2], units[1::2], strict=True):
        assert (one.problem, one.way, one.n) == (other.problem, other.way, other.n)
        assert {one.method, other.method} == {"plain", "STAND"}
    assert units[0].method != units[len(units) // 2].method  # backwards on every other problem


@pytest.mark.parametrize("problems", [1, 2])
def test_one_problem_has_no_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: int
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    stand = importlib.import_module("stand")
    found = {"generated": [9], "passes": [3], "right": [True], "majority": True}
    made = [
        found | {"unit": {"method": method, "way": "sequential", "n": 1, "problem": problem}}
        for method in ("plain", "STAND")
        for problem in range(problems)
    ]
    methods = {"plain": "none", "STAND": "stand"}
    stand.show_ablations(made, methods)
    stand.show_accuracy(made, methods)
    said = capsys.readouterr().out
    assert said.count(" to 1.000)") == 2 * (problems > 1)
    assert said.count(" to 100.0)") == 4 * (problems > 1)
    assert "| 1.000" in said and "| 100.0 %" in said
