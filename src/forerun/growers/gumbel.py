"""Children drawn without replacement in one go by Gumbel-Top-k, on a fixed template (STAND, RSD-C).

Kool et al., "Stochastic Beams and Where to Find Them", 2019: perturbed log-probabilities, sorted,
are sequential draws without replacement. With `branching` the template is a grid: the constant
branching of Jeon et al., "Recursive Speculative Decoding", 2024 (RSD-C).
"""

from __future__ import annotations

from forerun.core.dice import Dice
from forerun.core.tree import SWOR, Proposal
from forerun.core.tree_template import DEFAULT, Template, grid
from forerun.growers.base import Templated


class Gumbel(Templated):
    """Fills the first `plan.nodes` places of the template with draws without replacement.

    branching: instead of a template, how many children every node of level i has ("3+2+1").
    """

    labels = frozenset({"swor"})
    law = SWOR

    def __init__(self, *, template: Template = DEFAULT, branching: tuple[int, ...] = ()) -> None:
        super().__init__(template=grid(*branching) if branching else template)

    def choose(self, q: Proposal, count: int, dice: Dice) -> list[int]:
        return dice.without_replacement(q.probs, count)
