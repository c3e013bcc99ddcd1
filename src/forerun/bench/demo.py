"""The demo: several answers to each prompt by plain decoding and by drafters, interleaved.

All arms see the same prompts in one process, in alternating order within every level, each with an
empty cache. Answers of checkable tasks are scored. Tokens per second are generated tokens over wall
time, prefill included.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun import assets
from forerun.bench.metrics import geometric_mean, group_of, interval
from forerun.core.records import Step
from forerun.core.sampling import Sampling
from forerun.engine.stats import Stats
from forerun.lossless.greedy import empty_cache
from forerun.utils.stats import majority

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.tasks.base import Example

MIN_PROMPTS_FOR_INTERVAL = 5


@dataclass(frozen=True)
class Outcome:
    """One prompt answered n times by one arm."""

    problem: int
    level: int
    arm: str
    seconds: float
    answers: list[str | None]  # by trajectory
    expected: str  # "" if answers cannot be checked
    stats: list[Stats]  # by trajectory

    @property
    def total(self) -> Stats:
        """Statistics of all trajectories."""
        total = Stats()
        for stats in self.stats:
            total.add(stats)
        return total

    @property
    def tokens_per_second(self) -> float:
        return self.total.generated / self.seconds

    @property
    def num_right(self) -> int:
        """Number of right samples."""
        return sum(answer == self.expected for answer in self.answers)

    @property
    def is_majority_right(self) -> bool:
        return majority(self.answers) == self.expected

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("problem", "level", "arm", "seconds", "answers", "expected")
        counts = {"num_right": self.num_right, "is_majority_right": self.is_majority_right}
        per_trajectory = {"trajectories": [stats.to_dict() for stats in self.stats]}
        return {name: getattr(self, name) for name in names} | counts | per_trajectory


def held_out(num: int) -> list[Example]:
    """Word problems held out from the training of the embedded reasoner."""
    from forerun.tasks.reasoning import ReasoningTask

    task = ReasoningTask("heldout")
    return [task.example(i) for i in range(num)]


def everyday(model: Model) -> list[Example]:
    """The built-in demo prompts, in the model's chat template."""
    from forerun.tasks.base import Example, plain_text, prepare

    text = (Path(assets.__file__).parent / "demo_prompts.json").read_text(encoding="utf-8")
    found = [
        Example(
            row["name"], plain_text([row["text"]]), "", category=row["name"], turns=(row["text"],)
        )
        for row in json.loads(text)
    ]
    return [prepare(example, model.tokenizer) for example in found]


def solve(
    model: Model,
    example: Example,
    problem: int,
    arm: str,
    sampling: Sampling,
    *,
    batch: int = 1,
    on_step: Callable[[Step], None] | None = None,
) -> Outcome:
    """Runs one arm, named by its drafter, on one problem."""
    from forerun.tasks.reasoning import read_answer

    start = time.perf_counter()
    run = model.run([example.prompt], sampling, drafter=arm, batch=batch, on_step=on_step)
    samples = sorted(run, key=lambda sample: sample.index)
    seconds = time.perf_counter() - start
    answers = [read_answer(sample.text) for sample in samples]
    stats = [sample.stats for sample in samples]
    return Outcome(problem, example.level, arm, seconds, answers, example.answer, stats)


def warm_up(
    model: Model, example: Example, arms: Many[str], sampling: Sampling, *, batch: int = 1
) -> None:
    """A short run of all arms that is not counted."""
    short = replace(sampling, n=max(2, batch), max_new_tokens=min(64, sampling.max_new_tokens))
    for arm in arms:
        solve(model, example, -1, arm, short, batch=batch)


def compare(
    model: Model,
    examples: Many[Example],
    arms: Many[str],
    sampling: Sampling,
    *,
    batch: int = 1,
    on_step: Callable[[Step], None] | None = None,
) -> Iterator[Outcome]:
    """All arms on every prompt, in rotating order within a level; yields finished outcomes.

    The cache is emptied before each, so that every arm includes the prefill.
    """
    seen: Counter[int] = Counter()
    for i, example in enumerate(examples):
        turn = (seen[example.level] + example.level) % len(arms)
        seen[example.level] += 1
        for arm in (*arms[turn:], *arms[:turn]):
            empty_cache(model)
            yield solve(model, example, i, arm, sampling, batch=batch, on_step=on_step)


def summary(outcomes: Many[Outcome], arms: Many[str]) -> dict[str, Any]:
    """Figures of all arms over the prompts finished by all; plain values.

    The first arm is the baseline; the speed-up of the last one is also a top-level entry.
    """
    by_arm = {arm: {o.problem: o for o in outcomes if o.arm == arm} for arm in arms}
    done = sorted(set.intersection(*(set(found) for found in by_arm.values())))
    found = {arm: figures([by_arm[arm][i] for i in done]) for arm in arms}
    for arm in arms[1:]:
        ratios = [
            by_arm[arm][i].tokens_per_second / by_arm[arms[0]][i].tokens_per_second for i in done
        ]
        found[arm]["speed_up"] = geometric_mean(ratios) if ratios else None
        found[arm]["speed_up_interval"] = (
            interval(ratios) if len(ratios) >= MIN_PROMPTS_FOR_INTERVAL else None
        )
    last = {name: found[arms[-1]][name] for name in ("speed_up", "speed_up_interval")}
    return {"problems": len(done), "arms": found} | last


def by_trajectory(outcomes: Many[Outcome]) -> dict[str, Stats]:
    """Statistics of trajectories 1, 2, 3-4, 5-8, ... summed over problems."""
    sums: dict[str, Stats] = {}
    for outcome in outcomes:
        for number, stats in enumerate(outcome.stats, start=1):
            sums.setdefault(group_of(number), Stats()).add(stats)
    return sums


def figures(outcomes: Many[Outcome]) -> dict[str, Any]:
    """Accuracy, speed and statistics of one arm; plain values."""
    total = Stats()
    for outcome in outcomes:
        total.add(outcome.total)
    num_samples = sum(len(outcome.answers) for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    return {
        "accuracy_one": sum(o.num_right for o in outcomes) / max(num_samples, 1),
        "accuracy_majority": sum(o.is_majority_right for o in outcomes) / max(len(outcomes), 1),
        "wall_tokens_per_second": total.generated / max(seconds, 1e-9),
        "stats": total.to_dict(),
        "by_trajectory": {
            name: {"tau": round(s.tau, 3), "acceptance_rate": round(s.acceptance_rate, 4)}
            for name, s in by_trajectory(outcomes).items()
        },
    }
