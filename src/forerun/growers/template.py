"""Children are the most likely tokens, their number fixed beforehand by a ranked template.

Token Recycling and STAND's deterministic variant use this form; see `forerun.template`.
"""

from __future__ import annotations

import numpy as np

from forerun.dice import Dice
from forerun.growers.base import Templated
from forerun.tree import POINT, Proposal


class TopTemplate(Templated):
    """Fills the first `plan.nodes` places of the template with the top tokens of each q."""

    labels = frozenset({"point"})
    law = POINT

    def choose(self, q: Proposal, count: int, dice: Dice) -> list[int]:
        return np.lexsort((q.ids, -q.probs))[:count].tolist()
