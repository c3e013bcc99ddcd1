"""Stochastic beam search: the best `width` paths by perturbed log-probability, level by level.

Kool et al., "Stochastic Beams and Where to Find Them", 2019; as a draft tree (RSD-S): Jeon et al.,
"Recursive Speculative Decoding", 2024. A path's log-probability gets Gumbel noise G; its children
get theirs under the condition that the largest of them is the parent's G. The nodes of a level are
then the paths whose G is among the `width` largest: draws without replacement of whole paths, in
falling order of G. Labels: siblings in that order are draws without replacement from q, and whether
a sibling exists depends on values, never on its own token.

`race` is the paper's form. `one_by_one` has the same law with plain choices in the place of noise:
it is what tests enumerate, and what runs for dice that have no uniforms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from forerun.core.dice import Dice, SeededDice
from forerun.core.records import Plan
from forerun.core.roles import Grower, Growth
from forerun.core.tree import SWOR, Proposal, TreeBuilder
from forerun.errors import ConfigError


class Item(NamedTuple):
    """A path of the beam."""

    node: int
    logp: float  # log-probability of the path
    score: float  # the same, perturbed: G


class Child(NamedTuple):
    """A path of the next beam: an entry of the q after beam item `parent`."""

    parent: int
    entry: int
    logp: float
    score: float


class StochasticBeam(Grower):
    """At most `width` nodes per level; the plan's nodes and depth bound the levels."""

    labels = frozenset({"swor"})

    def __init__(self, *, width: int = 4) -> None:
        if width < 1:
            raise ConfigError(f"width must be at least 1, got {width}")
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
        return race(beam, qs, count, dice)
    return one_by_one(beam, qs, count, dice)


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


def race(beam: Many[Item], qs: Many[Proposal | None], count: int, dice: SeededDice) -> list[Child]:
    """The `count` children with the largest scores, best first."""
    found: list[Child] = []
    for parent, (item, q) in enumerate(zip(beam, qs, strict=True)):
        if q is not None:
            found += best_children(parent, item, q.probs, count, dice)
    return sorted(found, key=lambda child: -child.score)[:count]


def best_children(
    parent: int, item: Item, probs: np.ndarray, count: int, dice: SeededDice
) -> list[Child]:
    """Scores of one item's children given its own; the best `count`, in falling order."""
    waits = np.maximum(-np.log1p(-dice.peek(len(probs))), 1e-300)  # Exp(1): its -log is Gumbel
    dice.skip(len(probs))
    arrival = np.divide(waits, probs, out=np.full(len(probs), np.inf), where=probs > 0)
    first = np.argpartition(arrival, count)[:count] if count < len(probs) else np.arange(len(probs))
    order = first[np.argsort(arrival[first])]
    order = order[probs[order] > 0]
    perturbed = item.logp - np.log(arrival[order])
    scores = truncated(item.score, perturbed, perturbed.max(initial=-math.inf))
    logps = item.logp + np.log(probs[order])
    return [
        Child(parent, int(i), float(logp), float(score))
        for i, logp, score in zip(order, logps, scores, strict=True)
    ]


def truncated(bound: float, perturbed: np.ndarray, largest: float) -> np.ndarray:
    """Gumbel values given that their largest is `bound`: -log(e^-G - e^-Z + e^-g), stably.

    G is the bound, Z the largest of g as drawn, g the values [n] to be moved.
    """
    with np.errstate(divide="ignore"):  # log 0 at the largest itself, which becomes the bound
        v = bound - perturbed + np.log1p(-np.exp(perturbed - largest))
    return bound - np.maximum(0.0, v) - np.log1p(np.exp(-np.abs(v)))


def one_by_one(beam: Many[Item], qs: Many[Proposal | None], count: int, dice: Dice) -> list[Child]:
    """`count` children in the order in which whole paths would be drawn without replacement.

    The beam is in the order in which its items first came up. The next path either continues an
    item that has come up before, or is the first of the next item: the odds are those of what is
    left below the items that came up against all that never did.
    """
    masses = np.exp([item.logp for item in beam])
    left: list[np.ndarray] = []  # per item that came up: what remains of its q
    found: list[Child] = []
    while len(found) < count:
        at = len(left)
        again = masses[:at] * [rest.sum() for rest in left]
        if at < len(beam) and _is_new(masses, at, float(again.sum()), dice):
            q, parent = qs[at], at
            left.append(np.zeros(1) if q is None else np.array(q.probs))
            if q is None:  # the path ends there: it came up, but has no child
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
    """Whether the next path begins with an item that has not come up, of which `at` have."""
    unseen = max(1.0 - masses[:at].sum(), masses[at:].sum())
    return again <= 0 or dice.coin(unseen / (unseen + again))
