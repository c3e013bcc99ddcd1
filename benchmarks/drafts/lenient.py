"""Lossy verification: tau against right answers and likelihood, for the functions of DistillSpec.

The embedded reasoner with its draft, on held-out problems. The log-likelihood is the target's, per
token of the emitted text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from scripts import Row, table

import forerun
from drafts.common import Bench, PartSizes
from drafts.figures import NOT_SHOWN, SHOWN, cell, seeds_of, spread
from forerun import registry
from forerun.api import Model
from forerun.assets import embedded
from forerun.controllers.fixed import Fixed
from forerun.drafters.draft_model import DraftModel
from forerun.tasks.reasoning import MIX, ReasoningTask

KINDS = {"lin": "p / eps", "sq": "p / eps^2", "exp": "p^eps"}
TEMPERATURE, GAMMA, TOKENS = 0.6, 6, 200
FIRST_SEED = 810_000  # held-out problems


@dataclass(frozen=True)
class Sizes(PartSizes):
    problems: int
    eps: tuple[float, ...]


FULL, QUICK = Sizes(3, 64, (1.0, 0.7, 0.5, 0.3, 0.1)), Sizes(1, 4, (1.0, 0.3))
COLUMNS = {"tau": "tau", "right": "right answers", "likelihood": "log-likelihood per token"}


def run(bench: Bench) -> None:
    """A row for each function, eps and seed."""
    sizes, store = bench.part("lenient", FULL, QUICK)
    models = list[Model]()
    found = {
        (kind, eps): store.by_seed(
            f"{kind}, eps {eps}", sizes.seeds, partial(measured, models, sizes, kind, eps)
        )
        for kind, eps in product(KINDS, sizes.eps)
    }
    lines = [
        [KINDS[kind], f"{eps:g}", *(cell([row[name] for row in rows]) for name in COLUMNS)]
        for (kind, eps), rows in found.items()
    ]
    caption = (
        f"Verifier `lenient`, temperature {TEMPERATURE}, drafts of {GAMMA}, {sizes.problems} "
        f"problems, {TOKENS} tokens at most; eps = 1 is exact; {seeds_of(sizes.seeds)}."
    )
    head = ["f(p)", "eps", *COLUMNS.values()]
    goals = "\n".join(trend(kind, sizes, found) for kind in KINDS)
    bench.write("lenient", caption, table(head, lines), goals)


def measured(models: list[Model], sizes: Sizes, kind: str, eps: float, seed: int) -> Row:
    """tau, share of right answers and mean log-likelihood per token of one rule."""
    if not models:
        models.append(forerun.load("reasoner", max_seqs=32))
    task, model = ReasoningTask("heldout", MIX, seed=FIRST_SEED), models[0]
    examples = [task.example(i) for i in range(sizes.problems)]
    results = model.generate(
        [example.prompt for example in examples],
        drafter=DraftModel(model=embedded("draft"), tokenizer=model.tokenizer),
        verifier=registry.make("verifier", "lenient", kind=kind, eps=eps),
        controller=Fixed(nodes=GAMMA, depth=GAMMA),
        temperature=TEMPERATURE,
        max_new_tokens=TOKENS,
        seed=seed,
        batch=16,
        logprobs=0,
    )
    samples = [result.samples[0] for result in results]
    logp = [
        each[token]
        for sample in samples
        for token, each in zip(sample.tokens, sample.logprobs or (), strict=False)
    ]
    right = [task.score(e, s.text) for e, s in zip(examples, samples, strict=True)]
    passes = sum(result.stats.passes for result in results)
    tokens = sum(result.stats.generated for result in results)
    return {
        "tau": tokens / passes,
        "right": float(np.mean(right)),
        "likelihood": float(np.mean(np.maximum(logp, -30.0))),
    }


def trend(kind: str, sizes: Sizes, found: dict[tuple[str, float], list[Row]]) -> str:
    """Whether tau rises and right answers do not, from exact to the smallest eps."""
    first, last = (found[kind, eps] for eps in (sizes.eps[0], sizes.eps[-1]))

    def gaps(name: str) -> list[float]:
        return [b[name] - a[name] for a, b in zip(first, last, strict=True)]

    mean, half = spread(gaps("tau"))
    holds = mean - half > 0 and np.mean(gaps("right")) <= 0
    return (
        f"- {KINDS[kind]}, eps {sizes.eps[-1]:g} less exact: tau {cell(gaps('tau'))}, right "
        f"answers {cell(gaps('right'))}, log-likelihood {cell(gaps('likelihood'))}; "
        f"{SHOWN if holds else NOT_SHOWN}."
    )
