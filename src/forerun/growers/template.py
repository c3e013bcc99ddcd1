"""The most likely tokens as children, in numbers fixed by a ranked template.

Token Recycling and STAND's deterministic variant use it; see `forerun.core.tree_template`.
"""

from __future__ import annotations

import numpy as np

from forerun.core.dice import Dice
from forerun.core.tree import POINT, Proposal
from forerun.growers.base import Templated


class TopTemplate(Templated):
    """Fills the first `plan.nodes` places of the template with the top tokens of each q."""

    labels = frozenset({"point"})
    law = POINT

    def choose(self, q: Proposal, count: int, dice: Dice) -> list[int]:
        return np.lexsort((q.ids, -q.probs))[:count].tolist()
