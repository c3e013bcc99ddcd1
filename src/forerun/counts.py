"""What has come of one drafter's drafts, node by node, and what they cost."""

from __future__ import annotations

import numpy as np

from forerun.roles import Drafter

WEIGHT = 4.0  # trials that the first belief in a node stands for
KEEP = 0.9975  # of the counts, per draft
PRICED = 64  # steps with drafts between two times that the drafter is asked for its price


class Counts:
    """Trials and hits of the nodes of drafts of at most `nodes`.

    gains[N]: tokens that N nodes promise. vain, each, per_node: seconds of a look in vain, of a
    draft, and of each of its nodes, beside what any draft costs; none before the first `price`.
    """

    def __init__(self, drafter: Drafter, nodes: int) -> None:
        self.drafter, self.nodes = drafter, nodes
        # drafts that might have had node i, had it, and had it accepted; decayed
        self.asked, self.tries, self.hits = (np.zeros(nodes) for _ in range(3))
        self._hope = Drafter().hope()
        self._is_new = True
        self._news = 0  # drafts that are not among the gains yet
        self._priced = 0  # steps with drafts for which prices hold
        self.vain = self.each = self.per_node = 0.0
        self._sum_up()

    def price(self, num: int, *, is_due: bool = False) -> None:
        """Asks what drafts cost where so many decode at once, and at first what to hope for.

        A line is good enough. is_due: even if that was asked for lately.
        """
        if self._priced > 0 and not is_due:
            return
        if self._is_new:
            self._is_new = False
            self._hope = self.drafter.hope(num)
            self._sum_up()
        vain, one, many = (self.drafter.seconds(n, num) for n in (0, 1, self.nodes))
        self.per_node = (many - one) / max(self.nodes - 1, 1)
        self.vain, self.each, self._priced = vain, one - self.per_node, PRICED

    def add(self, asked: int, size: int, accepted: list[int]) -> None:
        """A draft of `size` nodes, of which some were accepted, where `asked` might have been."""
        self.asked[: max(asked, size)] += 1  # others may have added nodes
        self.tries[:size] += 1
        for node in accepted:
            if node < size:
                self.hits[node] += 1
        self._news += 1

    def decay(self, drafts: int) -> None:
        """A step with so many drafts is over."""
        self._priced -= 1
        for counts in (self.asked, self.tries, self.hits):
            counts *= KEEP**drafts

    def review(self, least: int) -> None:
        """Counts drafts among the gains, if they are so many at least."""
        if self._news >= least:
            self._news = 0
            self._sum_up()

    def _sum_up(self) -> None:
        """Sums of acceptance; a node is believed to fare a little worse than the one before it."""
        first, below = self._hope
        sums, rate = [0.0], first / below
        for tries, hits in zip(self.tries.tolist(), self.hits.tolist(), strict=True):
            rate = (hits + WEIGHT * below * rate) / (tries + WEIGHT)
            sums.append(sums[-1] + rate)
        self.gains = sums
        self.rates = np.diff(sums)
        # chance that a draft has node i, if it may
        self.made = np.minimum.accumulate((self.tries + WEIGHT) / (self.asked + WEIGHT))
