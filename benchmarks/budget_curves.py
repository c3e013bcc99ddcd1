"""The controller `budget` against the best fixed draft size, on given cost curves.

    python benchmarks/budget_curves.py [--problems 6] [--samples 4] [--batch 1] [--only stand]

The embedded reasoner decodes; time is not measured but computed: a pass over R rows takes c(R),
where c is one of the curves below, and a pass of the draft model takes DRAFT_SHARE of that. So
results depend on seeds only. For every drafter and curve: tokens per second of `budget` over those
of the best of no drafts and the fixed sizes. Goal: at least 0.9. In brackets the best size, its
tokens per plain step, and tau of `budget`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import scripts

import forerun
from forerun.core.cost import Cost
from forerun.core.mixins import priced
from forerun.core.records import Step
from forerun.core.roles import Drafter
from forerun.drafters.draft_model import DraftModel
from forerun.tasks.reasoning import MIX, ReasoningTask

FIRST_SEED = 640_000  # problems of this benchmark
CURVES = {  # seconds of a pass by rows, in passes of one row
    "flat": Cost((1, 65, 1025), (1.0, 1.05, 2.0)),
    "1 to 2": Cost((1, 65, 1025), (1.0, 2.0, 17.0)),
    "knee at 9": Cost((1, 9, 65, 1025), (1.0, 1.05, 4.5, 64.5)),
    "knee at 17": Cost((1, 17, 65, 1025), (1.0, 1.1, 4.1, 64.1)),
    "linear": Cost((1, 65, 1025), (1.0, 7.4, 103.4)),
    "steep": Cost((1, 65, 1025), (1.0, 65.0, 1025.0)),
}
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
DRAFTERS = (
    "stand", "suffix", "sam", "token_recycling", "prompt_lookup", "lookahead", "aded", "auto",
    "draft_model", "draft_model:grower=gumbel", "cascade:parts=suffix+stand",
    "fuse:parts=suffix+stand",
)  # fmt: skip
DRAFT_SHARE = 0.1  # of a pass of the target, for a pass of the draft model


class Steps:
    """Sizes of the steps of a run, from which its time on any curve follows."""

    def __init__(self) -> None:
        self.tokens, self.passes = 0, 0
        self.counts = Counter[tuple[int, tuple[int, ...]]]()  # rows of the pass; sizes of drafts

    def add(self, step: Step) -> None:
        """Listener."""
        num = len(step.seqs)
        self.passes += num
        self.tokens += sum(map(len, step.emitted))
        drafts = tuple(len(tree) for tree in step.trees if len(tree))
        self.counts[num - step.num_common + step.num_nodes, drafts] += 1

    def speed(self, cost: Cost, draft_seconds: Callable[[int], float]) -> float:
        """Tokens per second."""
        return self.tokens / sum(
            count * (cost.pass_time(rows) + sum(map(draft_seconds, drafts)))
            for (rows, drafts), count in self.counts.items()
        )


class Bench:
    """The reasoner and its draft, with given costs."""

    def __init__(self, problems: int, samples: int, batch: int) -> None:
        self.model = forerun.load("reasoner", max_seqs=max(batch, 4))
        self.runner = forerun.load("draft", max_seqs=max(batch, 4)).target
        task = ReasoningTask("heldout", MIX, seed=FIRST_SEED)
        self.prompts = [task.example(i).prompt for i in range(problems)]
        self.samples, self.batch = samples, batch

    def run(self, spec: str, controller: str, cost: Cost) -> Steps:
        """One drafter with one controller; all problems in turn."""
        self.set_cost(cost)
        drafter, steps = self.drafter(spec), Steps()
        for i, prompt in enumerate(self.prompts):
            self.model.generate(
                prompt,
                drafter=drafter,
                controller=controller,
                n=self.samples,
                batch=self.batch,
                temperature=0.6,
                max_new_tokens=200,
                seed=i,
                on_step=steps.add,
            )
        return steps

    def speed(self, spec: str, steps: Steps, cost: Cost) -> float:
        """Tokens per second of these steps."""
        self.set_cost(cost)
        drafter = self.drafter(spec)
        drafter.bind(self.model.target)
        return steps.speed(cost, partial(priced(drafter).draft_seconds, num=1))

    def set_cost(self, cost: Cost) -> None:
        """Sets the costs of the target and of its draft."""
        self.model.target.cost = cost
        self.runner.cost = replace(cost, seconds=tuple(DRAFT_SHARE * s for s in cost.seconds))

    def drafter(self, spec: str) -> Drafter:
        """A new drafter."""
        if not spec.startswith("draft_model"):
            return self.model.drafter(spec)
        grower = spec.partition("grower=")[2] or "chain"
        return DraftModel(model=self.runner, grower=grower)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4, help="per problem")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--only", default="", help="drafters, comma-separated")
    given = parser.parse_args()
    bench = Bench(given.problems, given.samples, given.batch)
    rules = {"none": "fixed:nodes=0"} | {str(k): f"fixed:nodes={k},depth=16" for k in SIZES}
    print(f"| drafter | {' | '.join(CURVES)} |\n|{'---|' * (len(CURVES) + 1)}")
    for spec in given.only.split(",") if given.only else DRAFTERS:
        fixed = {name: bench.run(spec, rule, CURVES["flat"]) for name, rule in rules.items()}
        cells = [cell(bench, spec, cost, fixed) for cost in CURVES.values()]
        print(f"| {spec} | {' | '.join(cells)} |", flush=True)


def cell(bench: Bench, spec: str, cost: Cost, fixed: dict[str, Steps]) -> str:
    """The ratio of `budget`, and the best fixed size with its tokens per plain step."""
    best, size = max((bench.speed(spec, steps, cost), name) for name, steps in fixed.items())
    found = bench.run(spec, "budget", cost)
    tau = found.tokens / found.passes
    return f"{bench.speed(spec, found, cost) / best:.2f} ({size}: {best:.2f}; tau {tau:.2f})"


if __name__ == "__main__":
    scripts.run(main)
