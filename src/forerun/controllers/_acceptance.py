"""Acceptance counts of drafts: per node of a drafter, and a factor per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.controllers._tree_size import node_estimates
from forerun.core.mixins import priced
from forerun.core.records import Plan
from forerun.core.roles import Drafter

DECAY = 0.9975  # of a drafter's counts, per draft
SEQUENCE_DECAY = 0.9  # of a sequence's means, per draft
MAX_WEIGHT = 1e9  # of a draft; then all counts are scaled down


class Acceptance:
    """Acceptance of node i in drafts of at most `nodes` nodes, and the cost of drafting.

    estimates: [3, nodes + 1], see `node_estimates`. per_draft, per_node: seconds.
    """

    def __init__(self, drafter: Drafter, nodes: int, num_seqs: int) -> None:
        self.drafter, self.nodes = drafter, nodes
        # [i]: drafts with i allowed nodes; drafts with i nodes; drafts with node i accepted
        self._counts = np.zeros((3, nodes + 1))
        self._weight = 1.0  # of the next draft; it grows, which decays earlier ones
        self._prior = priced(drafter).acceptance_prior(num_seqs)
        self._num_new = 0  # drafts since the last `update`
        self.estimates = np.empty((3, nodes + 1))
        self.update(num_seqs)

    def add(self, allowed: int, size: int, accepted: list[int]) -> None:
        """Counts a draft of `size` nodes for a plan of `allowed` nodes."""
        allowed_counts, made, hits = self._counts
        allowed_counts[min(max(allowed, size), self.nodes)] += self._weight
        made[min(size, self.nodes)] += self._weight
        for node in accepted:
            if node < self.nodes:
                hits[node] += self._weight
        self._weight /= DECAY
        self._num_new += 1

    def update(self, num_seqs: int) -> None:
        """Updates estimates and costs for steps in which `num_seqs` sequences draft."""
        if self._weight > MAX_WEIGHT:
            self._counts /= self._weight
            self._weight = 1.0
        node_estimates(self._counts, self._weight, *self._prior, self.estimates)
        self._empty, one, many = (
            priced(self.drafter).draft_seconds(n, num_seqs) for n in (0, 1, self.nodes)
        )
        if not np.isfinite(many):
            self.per_draft = self.per_node = np.inf
            return
        self.per_node = (many - one) / max(self.nodes - 1, 1)
        self.per_draft = one - self.per_node

    def seconds(self, size: int) -> float:
        """Seconds of a draft of `size` nodes."""
        return self.per_draft + size * self.per_node if size else self._empty

    def expected(self, size: int) -> float:
        """Expected number of accepted nodes of a draft of `size` nodes."""
        return float(self.estimates[2, min(size, self.nodes)])


@dataclass
class SequenceAcceptance:
    """Plan and acceptance of one running sequence."""

    acceptance: Acceptance  # of its drafter
    plan: Plan
    catch_up: float = 0.0  # seconds that the drafter needs for unread text
    last_probe: int = 0  # number of its last probe
    probe: Plan | None = None  # plan of its last probe
    num_probes: int = 0  # since it last drafted for more
    expected: float = 1.0  # mean of expected accepted nodes, of recent drafts
    accepted: float = 1.0  # mean of accepted nodes

    @property
    def factor(self) -> float:
        """Acceptance relative to all drafts of its drafter; at most 2."""
        return min(2.0, self.accepted / self.expected)

    def add(self, allowed: int, size: int, accepted: list[int]) -> None:
        """`Acceptance.add` for the sequence and its drafter."""
        weight = 1 - SEQUENCE_DECAY
        self.expected += weight * (self.acceptance.expected(size) - self.expected)
        self.accepted += weight * (len(accepted) - self.accepted)
        self.acceptance.add(allowed, size, accepted)
