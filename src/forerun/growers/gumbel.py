"""Children drawn without replacement in one go by Gumbel-Top-k, on a fixed template (STAND, RSD-C).

Kool et al., "Stochastic Beams and Where to Find Them", 2019: perturbed log-probabilities, sorted,
are sequential draws without replacement.
"""

from __future__ import annotations

from forerun.dice import Dice
from forerun.growers.base import Templated
from forerun.tree import SWOR, Proposal


class Gumbel(Templated):
    """Fills the first `plan.nodes` places of the template with draws without replacement."""

    labels = frozenset({"swor"})
    law = SWOR

    def choose(self, q: Proposal, count: int, dice: Dice) -> list[int]:
        return dice.without_replacement(q.probs, count)
