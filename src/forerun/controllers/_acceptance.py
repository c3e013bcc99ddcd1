"""What has come of one drafter's drafts, node by node, and what they cost."""

from __future__ import annotations

import numpy as np

from forerun.controllers._tree_size import believe
from forerun.core.mixins import DEFAULTS, priced
from forerun.core.roles import Drafter

KEEP = 0.9975  # of the counts, per draft
PRICED = 64  # steps with drafts between two times that the drafter is asked for its price
HEAVY = 1e9  # weight of a draft at which all is weighed anew


class Counts:
    """Trials and hits of the nodes of drafts of at most `nodes`.

    beliefs: what follows from them (`choosing.believe`), [3, nodes + 1]. gains[N]: tokens that N
    nodes promise. vain, each, per_node: seconds of a look in vain, of a draft, and of each of its
    nodes, beside what any draft costs; none before the first `price`.
    """

    def __init__(self, drafter: Drafter, nodes: int) -> None:
        self.drafter, self.nodes = drafter, nodes
        # drafts that might have had so many nodes, that had so many, and that had this one accepted
        # (arrays are dearer to change item by item)
        self.counts = [[0.0] * (nodes + 1) for _ in range(3)]
        self.beliefs = np.empty((3, nodes + 1))
        self.weight = 1.0  # of a draft of now; what was counted before weighs less
        self._prior = DEFAULTS.acceptance_prior()
        self._is_new = True
        self._news = 0  # drafts that beliefs do not know yet
        self.priced = 0  # steps with drafts for which prices hold
        self.vain = self.each = self.per_node = 0.0
        self._sum_up()

    def price(self, num: int) -> None:
        """Asks what drafts cost where so many decode at once, and at first what to hope for.

        A line is good enough.
        """
        if self._is_new:
            self._is_new = False
            self._prior = priced(self.drafter).acceptance_prior(num)
            self._sum_up()
        vain, one, many = (priced(self.drafter).draft_seconds(n, num) for n in (0, 1, self.nodes))
        self.per_node = (many - one) / max(self.nodes - 1, 1)
        self.vain, self.each, self.priced = vain, one - self.per_node, PRICED

    def add(self, asked: int, size: int, accepted: list[int]) -> None:
        """A draft of `size` nodes, of which some were accepted, where `asked` might have been."""
        might, had, hits = self.counts
        might[min(max(asked, size), self.nodes)] += self.weight  # others may have added nodes
        had[min(size, self.nodes)] += self.weight
        for node in accepted:
            if node < size:
                hits[node] += self.weight
        self._news += 1

    def decay(self, drafts: int) -> None:
        """A step with so many drafts is over."""
        self.priced -= 1
        self.weight *= KEEP**-drafts
        if self.weight > HEAVY:
            self.counts = [[count / self.weight for count in row] for row in self.counts]
            self.weight = 1.0

    def review(self, least: int) -> None:
        """Counts drafts among what is believed, if they are so many at least."""
        if self._news >= least:
            self._news = 0
            self._sum_up()

    def _sum_up(self) -> None:
        believe(np.array(self.counts), self.weight, *self._prior, self.beliefs)
        self.gains = self.beliefs[2].tolist()
