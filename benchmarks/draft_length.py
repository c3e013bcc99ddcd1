"""Draft length: SpecDec++ compared with fixed lengths and the additive schedule.

    python benchmarks/draft_length.py [--problems 24] [--samples 2] [--temperature 0.6]

Chains of the embedded draft model for the embedded reasoner, one sequence at a time. Contestants
take turns problem by problem, in a new order each time. The best fixed length and the best
threshold are chosen on training problems and measured on held-out ones. Speed is tokens per second
over those of the chosen fixed length, with a bootstrap interval over problems. Counts are per 100
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import scripts

import forerun
from forerun.assets import embedded
from forerun.drafters.draft_model import DraftModel
from forerun.engine.stats import Stats
from forerun.models.load import load_target
from forerun.tasks.reasoning import MIX, ReasoningTask

FIRST_SEED = 630_000  # problems of this benchmark
FIXED = tuple(f"fixed:nodes={k},depth={k}" for k in range(1, 9))
HEADS = tuple(f"acceptance_head:threshold={h}" for h in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9))

Counts = dict[str, list[Stats]]  # by contestant, per problem


class Contest(NamedTuple):
    """Who takes part: fixed lengths, the schedule, thresholds."""

    fixed: tuple[str, ...] = FIXED
    additive: str = "additive:nodes=20"
    heads: tuple[str, ...] = HEADS

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.fixed, self.additive, *self.heads)


class Pair:
    """The reasoner and its draft."""

    def __init__(self, samples: int, temperature: float) -> None:
        self.model = forerun.load("reasoner", max_seqs=4)
        self.runner = load_target(embedded("draft"), max_seqs=4)
        self.samples, self.temperature = samples, temperature

    def run(self, prompt: str, controller: str, seed: int) -> Stats:
        (result,) = self.model.generate(
            [prompt],
            drafter=DraftModel(model=self.runner),  # type: ignore[arg-type]
            verifier="speculative",
            controller=controller,
            n=self.samples,
            temperature=self.temperature,
            max_new_tokens=300,
            seed=seed,
        )
        self.runner.keeps_hidden = False  # type: ignore[attr-defined]
        return result.stats

    def measure(self, split: str, problems: int, contestants: Many[str]) -> Counts:
        """Every contestant on every problem, in turns."""
        task, rng = ReasoningTask(split, MIX, seed=FIRST_SEED), np.random.default_rng(0)
        found: Counts = {name: [] for name in contestants}
        for name in contestants:
            self.run(task.example(problems).prompt, name, 0)  # warm-up
        for i in range(problems):
            for at in rng.permutation(len(contestants)):
                name = contestants[at]
                found[name].append(self.run(task.example(i).prompt, name, i))
        return found


def total(stats: Many[Stats]) -> Stats:
    whole = Stats()
    for part in stats:
        whole.add(part)
    return whole


def speed(stats: Many[Stats]) -> float:
    """Tokens per second of all problems together."""
    return total(stats).tokens_per_second


def gain(found: Counts, name: str, over: str) -> tuple[float, float, float]:
    """Geometric mean over problems of the ratio of speeds, and its 95 % interval."""
    logs = np.log(
        [
            a.tokens_per_second / b.tokens_per_second
            for a, b in zip(found[name], found[over], strict=True)
        ]
    )
    draws = np.random.default_rng(0).choice(logs, (4000, len(logs))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return tuple(float(np.exp(x)) for x in (logs.mean(), low, high))  # type: ignore[return-value]


def pareto(found: Counts, contest: Contest, name: str) -> float:
    """Discarded drafts of fixed lengths at this one's target passes per token, less its own.

    Both per token; between two fixed lengths the line between them.
    """
    points = [total(found[fixed]) for fixed in contest.fixed]
    passes = np.array([s.passes / s.generated for s in points])
    waste = np.array([(s.drafted - s.accepted) / s.generated for s in points])
    own, order = total(found[name]), np.argsort(passes)
    at = np.interp(own.passes / own.generated, passes[order], waste[order])
    return float(at - (own.drafted - own.accepted) / own.generated)


def table(found: Counts, contest: Contest, fixed: str, head: str) -> None:
    """One line per contestant; * marks what was chosen on training problems."""
    heads = "length", "tau", "target passes", "draft passes", "discarded", "saved", "speed"
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|")
    for name in contest.all:
        s, mark = total(found[name]), " *" if name in (fixed, head) else ""
        per = 100 / s.generated
        mean, low, high = gain(found, name, fixed)
        cells = (
            f"{name}{mark}",
            f"{s.tau:.2f}",
            f"{s.passes * per:.1f}",
            f"{s.drafted * per:.1f}",
            f"{(s.drafted - s.accepted) * per:.1f}",
            f"{100 * pareto(found, contest, name):+.1f}",
            f"{mean:.3f} [{low:.3f}, {high:.3f}]",
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    print("\ncounts per 100 tokens; saved: discarded drafts fewer than fixed lengths have at")
    print("as many target passes; speed over the fixed length marked *\n")


def costs(found: Counts, name: str) -> str:
    """Milliseconds of a target pass and of a draft token."""
    s = total(found[name])
    target, draft = s.seconds["forward"] / s.passes, s.seconds["draft"] / max(s.drafted, 1)
    return f"{name}: target pass {1e3 * target:.2f} ms, draft token {1e3 * draft:.2f} ms"


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--problems", type=scripts.count, default=24)
    parser.add_argument("--samples", type=scripts.count, default=2)
    parser.add_argument("--temperature", type=scripts.measure, default=0.6)
    options = parser.parse_args()
    pair, contest = Pair(options.samples, options.temperature), Contest()
    fit = pair.measure("train", options.problems, contest.all)
    fixed = max(contest.fixed, key=lambda name: speed(fit[name]))
    head = max(contest.heads, key=lambda name: speed(fit[name]))
    print(f"chosen on {options.problems} training problems: {fixed}, {head}", flush=True)
    found = pair.measure("heldout", options.problems, contest.all)
    table(found, contest, fixed, head)
    for name in (fixed, head):
        print(costs(found, name))


if __name__ == "__main__":
    scripts.run(main)
