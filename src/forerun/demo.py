"""Best-of-n beside plain decoding, problem by problem: runs both, counts, and sums up.

Both arms see the same problems in the same process, in an order that alternates within every
level, each with an empty cache, and are scored by the task's own checker. Tokens per second are
generated tokens over wall time, prefill included.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forerun.bench.metrics import geometric_mean, interval
from forerun.engine.stats import Stats
from forerun.records import Step
from forerun.sampling import Sampling
from forerun.statistics import majority
from forerun.verifying import forget

if TYPE_CHECKING:
    from forerun.bench.tasks.base import Example
    from forerun.engine.api import Model

GROUPS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64))  # trajectories, from 1


@dataclass(frozen=True)
class Outcome:
    """One problem solved n times by one arm."""

    problem: int
    level: int
    arm: str
    seconds: float
    answers: list[str | None]  # by trajectory
    expected: str
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
        """How many single samples are right."""
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
    """Runs one arm (the text of a drafter) on one problem."""
    from forerun.bench.tasks.reasoning import read_answer

    start = time.perf_counter()
    run = model.run([example.prompt], sampling, drafter=arm, batch=batch, on_step=on_step)
    samples = sorted(run, key=lambda sample: sample.index)
    seconds = time.perf_counter() - start
    answers = [read_answer(sample.text) for sample in samples]
    stats = [sample.stats for sample in samples]
    return Outcome(problem, example.level, arm, seconds, answers, example.answer, stats)


def warm_up(
    model: Model, example: Example, arms: tuple[str, str], sampling: Sampling, *, batch: int = 1
) -> None:
    """A short run of both arms that is not counted: kernels, caches and pages are touched."""
    short = replace(sampling, n=max(2, batch), max_new_tokens=min(64, sampling.max_new_tokens))
    for arm in arms:
        solve(model, example, -1, arm, short, batch=batch)


def compare(
    model: Model,
    examples: Many[Example],
    arms: tuple[str, str],
    sampling: Sampling,
    *,
    batch: int = 1,
    on_step: Callable[[Step], None] | None = None,
) -> Iterator[Outcome]:
    """Both arms on every problem, A B and B A in turn at every level; yields as they finish.

    The cache is emptied before each, so that both compute the prompt.
    """
    seen: Counter[int] = Counter()
    for i, example in enumerate(examples):
        turn = (seen[example.level] + example.level) % 2
        seen[example.level] += 1
        for arm in arms[::-1] if turn else arms:
            forget(model)
            yield solve(model, example, i, arm, sampling, batch=batch, on_step=on_step)


def summary(outcomes: Many[Outcome], arms: tuple[str, str]) -> dict[str, Any]:
    """Figures of both arms over the problems that both have finished; plain values."""
    by_arm = {arm: {o.problem: o for o in outcomes if o.arm == arm} for arm in arms}
    done = sorted(set(by_arm[arms[0]]) & set(by_arm[arms[1]]))
    pairs = [(by_arm[arms[0]][i], by_arm[arms[1]][i]) for i in done]
    ratios = [b.tokens_per_second / a.tokens_per_second for a, b in pairs]
    return {
        "problems": len(done),
        "arms": {arm: figures([by_arm[arm][i] for i in done]) for arm in arms},
        "speed_up": geometric_mean(ratios) if ratios else None,
        "speed_up_interval": interval(ratios),
    }


def by_trajectory(outcomes: Many[Outcome]) -> dict[str, Stats]:
    """Statistics of trajectories 1, 2, 3-4, 5-8, ... added up over problems."""
    sums: dict[str, Stats] = {}
    for outcome in outcomes:
        for number, stats in enumerate(outcome.stats, start=1):
            low, high = next((g for g in GROUPS if g[0] <= number <= g[1]), (65, 0))
            name = f"{low}+" if not high else str(low) if low == high else f"{low}-{high}"
            sums.setdefault(name, Stats()).add(stats)
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
