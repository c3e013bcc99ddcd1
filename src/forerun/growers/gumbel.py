"""Children drawn without replacement by Gumbel-Top-k, on a fixed template (STAND, RSD-C).

Kool et al., "Stochastic Beams and Where to Find Them", 2019: sorted perturbed log-probabilities are
sequential draws without replacement. `branching` gives the constant branching of Jeon et al.,
"Recursive Speculative Decoding", 2024 (RSD-C).
"""

from __future__ import annotations

from forerun.core.dice import Dice
from forerun.core.tree import SWOR, Proposal
from forerun.core.tree_template import DEFAULT, Template, grid
from forerun.growers.base import Templated


class Gumbel(Templated):
    """Fills the first `plan.nodes` places of the template with draws without replacement.

    branching: children per node of each level ("3+2+1"); replaces the template.
    """

    labels = frozenset({"swor"})
    law = SWOR

    def __init__(self, *, template: Template = DEFAULT, branching: tuple[int, ...] = ()) -> None:
        super().__init__(template=grid(*branching) if branching else template)

    def choose(self, q: Proposal, count: int, dice: Dice) -> list[int]:
        return dice.without_replacement(q.probs, count)
