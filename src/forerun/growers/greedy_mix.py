"""The n - 1 most likely tokens of q, and one token drawn from the rest (MDSD's greedy drafts).

Hu et al., "Towards Optimal Multi-draft Speculative Decoding", 2025. Top is the set of the n - 1
most likely tokens; the last draft is drawn from q' = norm[q without Top]. No verifier accepts one
of them more often than p(Top) + sum min(p, q'). Recursive rejection reaches this bound if it tries
the drawn token first: a rejection keeps p's mass on Top.

The drawn child therefore comes first in the tree, with q' as its proposal. In the template it takes
the last rank. If q has fewer tokens than there are children, all its tokens become children.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from forerun.core.dice import Dice
from forerun.core.tree import IID, Proposal, TreeBuilder
from forerun.core.tree_template import DEFAULT, Template, grid
from forerun.growers.base import Templated


class GreedyMix(Templated):
    """Fills the first `plan.nodes` places of the template; an only child is drawn from q.

    branching: children per node of each level ("3+3+3"); replaces the template.
    """

    labels = frozenset({"point", "iid"})

    def __init__(self, *, template: Template = DEFAULT, branching: tuple[int, ...] = ()) -> None:
        super().__init__(template=grid(*branching) if branching else template)

    def choose(self, q: Proposal, count: int, dice: Dice) -> list[int]:
        top = most_likely(q, min(count, int(np.count_nonzero(q.probs))) - 1)
        return [*top, dice.choice(without(q, top).probs)]

    def add(self, tree: TreeBuilder, parent: int, q: Proposal, chosen: Many[int]) -> list[int]:
        *top, last = chosen
        drawn = tree.add(int(q.ids[last]), parent, IID, without(q, top))
        return [*(tree.add(int(q.ids[i]), parent) for i in top), drawn]


def most_likely(q: Proposal, count: int) -> list[int]:
    """Indices of the `count` largest probabilities, largest first; ties: lower token id first."""
    if count < 1:
        return []
    least = np.partition(q.probs, -count)[-count]
    found = np.flatnonzero(q.probs >= least)
    return found[np.lexsort((q.ids[found], -q.probs[found]))][:count].tolist()


def without(q: Proposal, removed: Many[int]) -> Proposal:
    """norm[q without the removed entries]."""
    if not removed:
        return q
    probs = q.probs.copy()
    probs[removed] = 0.0
    return Proposal(q.ids, probs / probs.sum())
