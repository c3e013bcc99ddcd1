"""The most likely tokens of q, and one more drawn from what is left of q: MDSD's greedy drafts.

Hu et al., "Towards Optimal Multi-draft Speculative Decoding", 2025. Of n drafts the n - 1 most
likely tokens, Top, are chosen; the last is drawn from q' = norm[q without Top]. No verifier accepts
one of them more often than p(Top) + sum min(p, q'), and recursive rejection that tries the drawn
one first does so: a rejection leaves p's share of Top whole, and that is then matched.

So the drawn child stands before the chosen ones, with q' as its own law. It fills the place of the
last rank, the chosen ones the places before it. Needs a q over many tokens: of a q that has fewer
tokens than children, all become children.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from forerun.core.dice import Dice
from forerun.core.tree import IID, Proposal, TreeBuilder
from forerun.core.tree_template import DEFAULT, Template, grid
from forerun.growers.base import Templated


class GreedyMix(Templated):
    """Fills the first `plan.nodes` places of the template; an only child is drawn from q itself.

    branching: instead of a template, how many children every node of level i has ("3+3+3").
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
    """Indices of the `count` largest probabilities, largest first; ties: the lowest token id."""
    if count < 1:
        return []
    least = np.partition(q.probs, -count)[-count]
    found = np.flatnonzero(q.probs >= least)
    return found[np.lexsort((q.ids[found], -q.probs[found]))][:count].tolist()


def without(q: Proposal, left_out: Many[int]) -> Proposal:
    """norm[q without some of its entries]."""
    if not left_out:
        return q
    probs = q.probs.copy()
    probs[left_out] = 0.0
    return Proposal(q.ids, probs / probs.sum())
