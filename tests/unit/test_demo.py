"""The demo counts what happened."""

from __future__ import annotations

from collections import Counter

import pytest

from forerun.bench import demo
from forerun.bench.demo import Outcome
from forerun.core.sampling import Sampling
from forerun.engine.stats import Stats
from forerun.tasks.base import Example
from forerun.tasks.reasoning import ReasoningTask


def outcome(problem: int, arm: str, seconds: float, answers: list[str | None]) -> Outcome:
    stats = [Stats(passes=5, drafted=20, accepted=5, generated=10) for _ in answers]
    return Outcome(problem, 1, arm, seconds, answers, "7", stats)


def test_majority_breaks_ties_by_the_first_seen() -> None:
    assert demo.majority(["3", "7", "7", "3", "5"]) == "3"
    assert demo.majority([None, "5", None]) == "5"
    assert demo.majority([None, None]) is None


def test_outcome_counts_right_answers() -> None:
    found = outcome(0, "stand", 2.0, ["7", "3", None, "7"])
    assert (found.num_right, found.is_majority_right) == (2, True)
    assert found.tokens_per_second == 20.0
    assert found.to_dict()["trajectories"][0]["tau"] == 2.0


def test_summary_uses_problems_that_both_arms_finished() -> None:
    outcomes = [
        outcome(0, "none", 4.0, ["7", "3"]),
        outcome(0, "stand", 2.0, ["7", "7"]),
        outcome(1, "stand", 1.0, ["3", "3"]),
        outcome(1, "none", 8.0, ["3", "7"]),
        outcome(2, "none", 1.0, ["7", "7"]),
    ]
    found = demo.summary(outcomes, ("none", "stand"))
    assert found["problems"] == 2
    assert found["speed_up"] == pytest.approx(4.0)  # geometric mean of 2 and 8
    assert found["speed_up_interval"] is None, "of two prompts it says nothing"
    plain, stand = found["arms"]["none"], found["arms"]["stand"]
    assert (plain["accuracy_one"], stand["accuracy_one"]) == (0.5, 0.5)
    assert (plain["accuracy_majority"], stand["accuracy_majority"]) == (0.5, 0.5)
    assert plain["wall_tokens_per_second"] == pytest.approx(40 / 12)


def test_each_arm_is_compared_with_the_first() -> None:
    seconds = {"none": 8.0, "stand": 4.0, "auto": 2.0}
    outcomes = [outcome(i, arm, s * (1 + i), ["7"]) for i in range(5) for arm, s in seconds.items()]
    found = demo.summary(outcomes, tuple(seconds))
    assert found["arms"]["stand"]["speed_up"] == pytest.approx(2.0)
    assert found["speed_up"] == found["arms"]["auto"]["speed_up"] == pytest.approx(4.0)
    assert found["speed_up_interval"] == pytest.approx((4.0, 4.0))
    assert "speed_up" not in found["arms"]["none"]


def test_three_arms_take_turns_at_being_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "solve", lambda model, example, i, arm, *_, **__: arm)
    monkeypatch.setattr(demo, "empty_cache", lambda model: None)
    arms = ("none", "stand", "auto")
    seen = list(demo.compare(None, [Example("", "", "")] * 6, arms, Sampling()))  # type: ignore
    rounds = [seen[at : at + 3] for at in range(0, 18, 3)]
    assert all(set(one) == set(arms) for one in rounds)
    assert Counter(one[0] for one in rounds) == dict.fromkeys(arms, 2)


def test_summary_of_nothing() -> None:
    found = demo.summary([], ("none", "stand"))
    assert found["problems"] == 0 and found["speed_up"] is None


def test_trajectories_are_grouped() -> None:
    found = demo.by_trajectory([outcome(0, "stand", 1.0, ["7"] * 70)])
    counts = {name: stats.passes // 5 for name, stats in found.items()}
    assert counts == {
        "1": 1, "2": 1, "3-4": 2, "5-8": 4, "9-16": 8, "17-32": 16, "33-64": 32, "65+": 6
    }  # fmt: skip


def test_every_level_sees_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ReasoningTask("heldout")
    forgotten = []

    def solve(model: object, example: Example, i: int, arm: str, *_: object, **__: object) -> tuple:
        return example.level, arm, len(forgotten)

    monkeypatch.setattr(demo, "solve", solve)
    monkeypatch.setattr(demo, "empty_cache", forgotten.append)
    examples = [task.example(i) for i in range(48)]
    seen = list(demo.compare(None, examples, ("none", "stand"), Sampling()))  # type: ignore
    firsts = Counter(run[:2] for run in seen[::2])
    for level in range(1, 7):
        assert firsts[level, "none"] == firsts[level, "stand"] > 1
    assert [run[2] for run in seen] == list(range(1, 97))  # before every run
