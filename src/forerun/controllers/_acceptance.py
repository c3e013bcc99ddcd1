"""Acceptance counts of drafts: per node for a drafter, and relative to that for one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.controllers._tree_size import node_beliefs
from forerun.core.mixins import priced
from forerun.core.records import Plan
from forerun.core.roles import Drafter

DECAY = 0.9975  # of a drafter's counts, per draft
RECENT = 0.9  # of a sequence's means, per draft
MAX_WEIGHT = 1e9  # of a draft, at which all counts are scaled down


class Acceptance:
    """Acceptance of node i in drafts of at most `nodes` nodes, and what such drafts cost.

    beliefs: [3, nodes + 1], see `node_beliefs`. per_draft, per_node: seconds of drafting.
    """

    def __init__(self, drafter: Drafter, nodes: int, num_seqs: int) -> None:
        self.drafter, self.nodes = drafter, nodes
        # drafts that were allowed so many nodes, that had so many, and that had this one accepted
        self._counts = np.zeros((3, nodes + 1))
        self._weight = 1.0  # of the next draft; instead of scaling all earlier ones down
        self._prior = priced(drafter).acceptance_prior(num_seqs)
        self._num_new = 0  # drafts since the last `update`
        self.beliefs = np.empty((3, nodes + 1))
        self.update(num_seqs)

    def add(self, allowed: int, size: int, accepted: list[int]) -> None:
        """Counts a draft of `size` nodes where the plan allowed `allowed`."""
        allowed_counts, made, hits = self._counts
        allowed_counts[min(max(allowed, size), self.nodes)] += self._weight
        made[min(size, self.nodes)] += self._weight
        for node in accepted:
            if node < self.nodes:
                hits[node] += self._weight
        self._weight /= DECAY
        self._num_new += 1

    def update(self, num_seqs: int) -> None:
        """Computes beliefs and prices for steps in which `num_seqs` sequences draft."""
        if self._weight > MAX_WEIGHT:
            self._counts /= self._weight
            self._weight = 1.0
        node_beliefs(self._counts, self._weight, *self._prior, self.beliefs)
        self._empty, one, many = (
            priced(self.drafter).draft_seconds(n, num_seqs) for n in (0, 1, self.nodes)
        )
        if not np.isfinite(many):
            self.per_draft = self.per_node = np.inf
            return
        self.per_node = (many - one) / max(self.nodes - 1, 1)
        self.per_draft = one - self.per_node

    def seconds(self, size: int) -> float:
        """Seconds of making a draft of `size` nodes."""
        return self.per_draft + size * self.per_node if size else self._empty

    def promised(self, size: int) -> float:
        """Nodes of a draft of `size` that are expected to be accepted."""
        return float(self.beliefs[2, min(size, self.nodes)])


@dataclass
class Record:
    """What is known of one running sequence."""

    acceptance: Acceptance  # of its drafter
    plan: Plan
    catch_up: float = 0.0  # seconds of its draft for text that the drafter had not read
    last_probe: int = 0  # number of its last probe
    promised: float = 1.0  # mean nodes of recent drafts that were expected to be accepted
    accepted: float = 1.0  # mean nodes that were

    @property
    def factor(self) -> float:
        """How much better its drafts do than all of its drafter's; at most 2."""
        return min(2.0, self.accepted / self.promised)

    def add(self, allowed: int, size: int, accepted: list[int]) -> None:
        """Counts a draft as `Acceptance.add` does, for the sequence and for its drafter."""
        self.promised += (1 - RECENT) * (self.acceptance.promised(size) - self.promised)
        self.accepted += (1 - RECENT) * (len(accepted) - self.accepted)
        self.acceptance.add(allowed, size, accepted)
