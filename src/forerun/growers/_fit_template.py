"""Ranks template places by their acceptance rate (STAND, section 4).

A place with t trials, h acceptances and prior rate r has the value (h + W r) / (t + W).
Values of siblings are made non-increasing by isotonic regression. Places are then taken best first,
parents and lower ranks before others, so the first N places are the best tree of N nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.core.records import Plan, Step
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.core.tree_template import DEFAULT, RANK_VALUES, Template

if TYPE_CHECKING:
    from forerun.api import Model

Place = tuple[int, ...]
MAX_NODES, MAX_DEPTH = 625, 20  # of the counted template
PRIOR_TRIALS = 8.0  # weight of the prior rate
FILE_NAME = "forerun-template.json"  # in a model's folder


class PlaceCounts:
    """Trials and acceptances per template place."""

    def __init__(self, template: Template = DEFAULT) -> None:
        self.places = template.places
        self.index = {place: i for i, place in enumerate(self.places)}
        self.tries, self.hits = np.zeros(len(self.places)), np.zeros(len(self.places))
        self.depths = np.array([len(place) for place in self.places])
        self.prior_rates = np.array([prior_rate(place) for place in self.places])
        self.passes = 0
        self._order = np.arange(len(self.places))  # current ranking

    def count(self, tree: Tree, accepted: Many[int], plan: Plan) -> None:
        """Counts one pass with a tree of the current ranking; `accepted`: nodes, top down."""
        offered = self._order[: plan.nodes]
        self.tries[offered[self.depths[offered] <= plan.depth]] += 1
        self.passes += 1
        place: Place = ()
        for node in accepted:
            rank = int(np.count_nonzero(tree.parents[:node] == tree.parents[node]))
            place = (*place, rank)
            if place in self.index:
                self.hits[self.index[place]] += 1

    def rates(self) -> np.ndarray:
        """The smoothed acceptance rate per place, float64 [places]."""
        return (self.hits + PRIOR_TRIALS * self.prior_rates) / (self.tries + PRIOR_TRIALS)

    def ranked(self) -> Template:
        """The places by rate. Later calls of `count` assume drafts that use this ranking."""
        found = ranking(dict(zip(self.places, self.rates().tolist(), strict=True)))
        self._order = np.array([self.index[place] for place in found.places])
        return found

    def facts(self, template: Template) -> dict[str, Any]:
        """Counts in the order of a template, for its file."""
        order = [self.index[place] for place in template.places]
        counts = {"hits": self.hits[order], "tries": self.tries[order]}
        return {"passes": self.passes} | {k: v.astype(int).tolist() for k, v in counts.items()}


def prior_rate(place: Place) -> float:
    """The rate of a place without trials: the product of RANK_VALUES along its path."""
    return float(np.prod([RANK_VALUES[min(rank, len(RANK_VALUES) - 1)] for rank in place]))


def ranking(values: dict[Place, float]) -> Template:
    """Places by falling value, after their parents and lower-ranked siblings.

    Ties: shallower places first, then lower ranks.
    """
    pooled = _pooled(values)
    heap: list[tuple[float, int, Place]] = []
    ranked: list[Place] = []

    def push(place: Place) -> None:
        if place in pooled:
            heapq.heappush(heap, (-pooled[place], len(place), place))

    push((0,))
    while heap:
        place = heapq.heappop(heap)[2]
        ranked.append(place)
        push((*place, 0))
        push((*place[:-1], place[-1] + 1))
    return Template(tuple(ranked))


def _pooled(values: dict[Place, float]) -> dict[Place, float]:
    """Values that never rise with the rank among siblings (isotonic regression)."""
    families: dict[Place, list[float]] = {}
    for place in sorted(values):
        families.setdefault(place[:-1], []).append(values[place])
    found: dict[Place, float] = {}
    for stem, family in families.items():
        blocks: list[tuple[float, int]] = []  # mean and size
        for value in family:
            blocks.append((value, 1))
            while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
                (b, m), (a, n) = blocks.pop(), blocks.pop()
                blocks.append(((a * n + b * m) / (n + m), n + m))
        flat = [mean for mean, size in blocks for _ in range(size)]
        found |= {(*stem, rank): mean for rank, mean in enumerate(flat)}
    return found


def count_places(
    model: Model,
    prompts: Many[str | list[int]],
    sampling: Sampling,
    *,
    drafter: str = "stand",
    batch: int = 1,
    nodes: int = MAX_NODES,
    depth: int = MAX_DEPTH,
) -> Iterator[PlaceCounts]:
    """Decodes the prompts with the largest template; yields the counts after each prompt."""
    from forerun import registry
    from forerun.controllers.fixed import Fixed

    counts = PlaceCounts()

    def count_step(step: Step) -> None:
        for tree, verdict, plan in zip(step.trees, step.verdicts, step.plans, strict=True):
            counts.count(tree, verdict.nodes, plan)

    made = registry.make("drafter", drafter, template=DEFAULT)
    for prompt in prompts:
        single: Any = [prompt]
        model.generate(
            single,
            sampling,
            drafter=made,
            controller=Fixed(nodes=nodes, depth=depth),
            batch=batch,
            on_step=count_step,
        )
        yield counts


def measure(
    model: Model,
    prompts: Many[str | list[int]],
    sampling: Sampling,
    template: Template,
    nodes: int,
    *,
    drafter: str = "stand",
    batch: int = 1,
) -> float:
    """Tokens per pass on prompts, with the first `nodes` places of a template."""
    from forerun import registry
    from forerun.controllers.fixed import Fixed

    all_prompts: Any = list(prompts)
    made = registry.make("drafter", drafter, template=template)
    controller = Fixed(nodes=nodes, depth=MAX_DEPTH)
    results = model.generate(
        all_prompts, sampling, drafter=made, controller=controller, batch=batch
    )
    generated = sum(result.stats.generated for result in results)
    return generated / max(1, sum(result.stats.passes for result in results))


def fitted_for(tokenizer: Any) -> Path | None:
    """The template file of the model that a tokenizer belongs to, or None."""
    name = getattr(getattr(tokenizer, "inner", None), "name_or_path", "")
    return fitted_file(str(name)) if name else None


def fitted_file(name: str) -> Path | None:
    """The template file of a model, in its folder or in the user's cache, or None."""
    from forerun.models.paths import located

    in_folder = Path(located(name)).expanduser() / FILE_NAME
    if in_folder.is_file():
        return in_folder
    cached = cache_file(name)
    return cached if cached is not None and cached.is_file() else None


def cache_file(name: str) -> Path | None:
    """The cache file for a model with a read-only folder; None: the model is unknown."""
    from forerun.models.identity import model_hash
    from forerun.utils.paths import cache_folder

    key = model_hash(name)
    return cache_folder() / "templates" / f"{key[:32]}.json" if key else None
