"""Stochastic beam search: the best `width` paths by perturbed log-probability, level by level.

Kool et al., "Stochastic Beams and Where to Find Them", 2019; as a draft tree (RSD-S): Jeon et al.,
"Recursive Speculative Decoding", 2024. G is a path's log-probability with Gumbel noise. The G of
the children are sampled under the condition that their maximum is the parent's G. A level holds the
`width` paths with the largest G: draws of whole paths without replacement, in falling order of G.
Siblings in that order are draws without replacement from q. Whether a sibling exists depends on
values of G, never on its own token.

`perturbed_children` is the paper's form. `sequential_children` has the same distribution but uses
plain choices; tests enumerate it, and it runs for dice without uniform numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from forerun.core.dice import Dice, SeededDice
from forerun.core.growing import Grower, Growth
from forerun.core.records import Plan
from forerun.core.tree import SWOR, Proposal, TreeBuilder
from forerun.errors import ConfigError


class Item(NamedTuple):
    """One path of the beam."""

    node: int
    logp: float  # log-probability of the path
    score: float  # G: the perturbed log-probability


class Child(NamedTuple):
    """One path of the next beam: an entry of the q of beam item `parent`."""

    parent: int
    entry: int
    logp: float
    score: float


class StochasticBeam(Grower):
    """At most `width` nodes per level, within the plan's nodes and depth."""

    labels = frozenset({"swor"})

    def __init__(self, *, width: int = 4) -> None:
        if width < 1:
            raise ConfigError(f"width={width} is too small; use at least 1")
        self.width = width

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, beam = TreeBuilder(), [Item(-1, 0.0, 0.0)]
        for _ in range(plan.depth):
            room = min(self.width, plan.nodes - len(tree))
            if not beam or room < 1:
                break
            qs = yield [tuple(tree.path(item.node)) for item in beam]
            children = extend(beam, qs, room, dice)
            beam = add(tree, beam, qs, children)
        return tree.build()


def extend(beam: Many[Item], qs: Many[Proposal | None], count: int, dice: Dice) -> list[Child]:
    """At most `count` paths of the next level, best first."""
    if isinstance(dice, SeededDice):
        return perturbed_children(beam, qs, count, dice)
    return sequential_children(beam, qs, count, dice)


def add(
    tree: TreeBuilder, beam: Many[Item], qs: Many[Proposal | None], children: Many[Child]
) -> list[Item]:
    """Adds the children, best first; returns the next beam."""
    items: list[Item] = []
    for child in children:
        q = qs[child.parent]
        assert q is not None, "children come from a q"
        node = tree.add(int(q.ids[child.entry]), beam[child.parent].node, SWOR, q)
        items.append(Item(node, child.logp, child.score))
    return items


def perturbed_children(
    beam: Many[Item], qs: Many[Proposal | None], count: int, dice: SeededDice
) -> list[Child]:
    """The `count` children with the largest scores, best first."""
    found: list[Child] = []
    for parent, (item, q) in enumerate(zip(beam, qs, strict=True)):
        if q is not None:
            found += best_children(parent, item, q.probs, count, dice)
    return sorted(found, key=lambda child: -child.score)[:count]


def best_children(
    parent: int, item: Item, probs: np.ndarray, count: int, dice: SeededDice
) -> list[Child]:
    """The `count` best children of one item given its score, in falling order of theirs."""
    exponential = np.maximum(-np.log1p(-dice.peek(len(probs))), 1e-300)  # Gumbel = -log Exp(1)
    dice.skip(len(probs))
    times = np.divide(exponential, probs, out=np.full(len(probs), np.inf), where=probs > 0)
    first = np.argpartition(times, count)[:count] if count < len(probs) else np.arange(len(probs))
    order = first[np.argsort(times[first])]
    order = order[probs[order] > 0]
    perturbed = item.logp - np.log(times[order])
    scores = truncated(item.score, perturbed, perturbed.max(initial=-math.inf))
    logps = item.logp + np.log(probs[order])
    return [
        Child(parent, int(i), float(logp), float(score))
        for i, logp, score in zip(order, logps, scores, strict=True)
    ]


def truncated(bound: float, perturbed: np.ndarray, largest: float) -> np.ndarray:
    """Gumbel values given that their maximum is `bound`: -log(e^-G - e^-Z + e^-g), stably.

    G: the bound; g: the drawn values [n]; Z: their maximum.
    """
    with np.errstate(divide="ignore"):  # log 0 at the maximum, which becomes the bound
        v = bound - perturbed + np.log1p(-np.exp(perturbed - largest))
    return bound - np.maximum(0.0, v) - np.log1p(np.exp(-np.abs(v)))


def sequential_children(
    beam: Many[Item], qs: Many[Proposal | None], count: int, dice: Dice
) -> list[Child]:
    """`count` children in the order of sequential draws of whole paths without replacement.

    Beam items are in the order of their first draw. The next path either continues an item drawn
    before, or is the first path of the next item. The odds are the remaining mass below the drawn
    items against the mass of all items not drawn.
    """
    masses = np.exp([item.logp for item in beam])
    left: list[np.ndarray] = []  # per drawn item: the remaining q
    found: list[Child] = []
    while len(found) < count:
        at = len(left)
        again = masses[:at] * [rest.sum() for rest in left]
        if at < len(beam) and _is_new(masses, at, float(again.sum()), dice):
            q, parent = qs[at], at
            left.append(np.zeros(1) if q is None else np.array(q.probs))
            if q is None:  # the path ends: the item was drawn, but has no child
                continue
        elif again.sum() > 0:
            parent = dice.choice(again)
        else:
            break
        entry = dice.choice(left[parent])
        logp = beam[parent].logp + math.log(left[parent][entry])
        found.append(Child(parent, entry, logp, math.nan))
        left[parent][entry] = 0.0
    return found


def _is_new(masses: np.ndarray, at: int, again: float, dice: Dice) -> bool:
    """Draws whether the next path belongs to an item not drawn so far; `at` items were drawn."""
    unseen = max(1.0 - masses[:at].sum(), masses[at:].sum())
    return again <= 0 or dice.coin(unseen / (unseen + again))
