"""Ranks the places of a template by how often they were on the accepted path (STAND, section 4).

A place that was offered t times and accepted h times is worth (h + W r) / (t + W): its count, and a
belief r that decides while there are few. Siblings whose counts contradict their order are pooled,
the likeliest reading under "never worse than the next one"; then the best place that may come next
comes next, so every N first places are the best tree of N nodes that the ranking knows.
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
GRID, DEPTH = 625, 20  # nodes and levels of the tree whose places are counted
WEIGHT = 8.0  # trials that the belief stands for
FILE = "forerun-template.json"  # in a model's folder


class Tally:
    """How often each place was offered, and how often accepted."""

    def __init__(self, template: Template = DEFAULT) -> None:
        self.places = template.places
        self.index = {place: i for i, place in enumerate(self.places)}
        self.tries, self.hits = np.zeros(len(self.places)), np.zeros(len(self.places))
        self.depths = np.array([len(place) for place in self.places])
        self.belief = np.array([belief(place) for place in self.places])
        self.passes = 0
        self._order = np.arange(len(self.places))  # ranking that drafts are made by

    def count(self, tree: Tree, accepted: Many[int], plan: Plan) -> None:
        """One pass with a tree made by the present ranking; `accepted` nodes from the top down."""
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
        """What each place is worth, float64 [places]."""
        return (self.hits + WEIGHT * self.belief) / (self.tries + WEIGHT)

    def ranked(self) -> Template:
        """The places by worth; drafts are taken to be made by this ranking from now on."""
        found = ranking(dict(zip(self.places, self.rates().tolist(), strict=True)))
        self._order = np.array([self.index[place] for place in found.places])
        return found

    def facts(self, template: Template) -> dict[str, Any]:
        """Counts in the order of a ranking, for its file."""
        order = [self.index[place] for place in template.places]
        counts = {"hits": self.hits[order], "tries": self.tries[order]}
        return {"passes": self.passes} | {k: v.astype(int).tolist() for k, v in counts.items()}


def belief(place: Place) -> float:
    """What a place is worth before anything was counted: shares by rank, multiplied."""
    return float(np.prod([RANK_VALUES[min(rank, len(RANK_VALUES) - 1)] for rank in place]))


def ranking(worth: dict[Place, float]) -> Template:
    """Places by falling worth, parents and elder siblings first; ties: shallower, lower rank."""
    pooled = _pooled(worth)
    heap: list[tuple[float, int, Place]] = []
    ranked: list[Place] = []

    def may_come(place: Place) -> None:
        if place in pooled:
            heapq.heappush(heap, (-pooled[place], len(place), place))

    may_come((0,))
    while heap:
        place = heapq.heappop(heap)[2]
        ranked.append(place)
        may_come((*place, 0))
        may_come((*place[:-1], place[-1] + 1))
    return Template(tuple(ranked))


def _pooled(worth: dict[Place, float]) -> dict[Place, float]:
    """Worth that never rises among siblings: violators share their mean (isotonic regression)."""
    families: dict[Place, list[float]] = {}
    for place in sorted(worth):
        families.setdefault(place[:-1], []).append(worth[place])
    found: dict[Place, float] = {}
    for stem, values in families.items():
        blocks: list[tuple[float, int]] = []  # mean and size
        for value in values:
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
    nodes: int = GRID,
    depth: int = DEPTH,
) -> Iterator[Tally]:
    """Decodes prompt by prompt with the widest template; yields the tally as it grows."""
    from forerun import registry
    from forerun.controllers.fixed import Fixed

    tally = Tally()

    def listen(step: Step) -> None:
        for tree, verdict, plan in zip(step.trees, step.verdicts, step.plans, strict=True):
            tally.count(tree, verdict.nodes, plan)

    made = registry.make("drafter", drafter, template=DEFAULT)
    for prompt in prompts:
        own: Any = [prompt]
        model.generate(
            own,
            sampling,
            drafter=made,
            controller=Fixed(nodes=nodes, depth=depth),
            batch=batch,
            on_step=listen,
        )
        yield tally


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
    """tau on prompts with the first `nodes` places of a template."""
    from forerun import registry
    from forerun.controllers.fixed import Fixed

    own: Any = list(prompts)
    made = registry.make("drafter", drafter, template=template)
    controller = Fixed(nodes=nodes, depth=DEPTH)
    results = model.generate(own, sampling, drafter=made, controller=controller, batch=batch)
    generated = sum(result.stats.generated for result in results)
    return generated / max(1, sum(result.stats.passes for result in results))


def fitted_for(tokenizer: Any) -> Path | None:
    """The file of the template fitted for the model that a tokenizer was loaded with, if any."""
    name = getattr(getattr(tokenizer, "inner", None), "name_or_path", "")
    return fitted_file(str(name)) if name else None


def fitted_file(name: str) -> Path | None:
    """The file of the template that was fitted for a model, in its folder or the user's cache."""
    from forerun.models.paths import located

    own = Path(located(name)).expanduser() / FILE
    if own.is_file():
        return own
    cached = cache_file(name)
    return cached if cached is not None and cached.is_file() else None


def cache_file(name: str) -> Path | None:
    """Where a template goes whose model's folder is not ours to write to; None: model unknown."""
    from forerun.models.identity import model_hash
    from forerun.utils.paths import cache_folder

    key = model_hash(name)
    return cache_folder() / "templates" / f"{key[:32]}.json" if key else None
