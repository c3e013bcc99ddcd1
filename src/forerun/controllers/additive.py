"""Additive draft length per sequence: longer after full acceptance, shorter otherwise.

The heuristic schedule of assisted generation in transformers: +2 if the whole draft was accepted,
-1 otherwise. It changes the depth; the number of nodes is fixed.
"""

from __future__ import annotations

from forerun.controllers.fixed import MAX_NODES
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Controller
from forerun.errors import ConfigError


class Additive(Controller):
    """Depth starts at `depth`, changes by +`up` or -`down`, and stays within [least, most]."""

    def __init__(
        self,
        *,
        nodes: int = 8,
        depth: int = 5,
        up: int = 2,
        down: int = 1,
        least: int = 1,
        most: int = 20,
    ) -> None:
        if not 0 <= nodes <= MAX_NODES or not 1 <= least <= depth <= most or min(up, down) < 0:
            raise ConfigError(
                f"additive needs 0 to {MAX_NODES} nodes, up, down >= 0 and 1 <= least <= depth <= "
                f"most, got {nodes=}, {up=}, {down=}, {least=}, {depth=}, {most=}"
            )
        self.nodes, self.first = nodes, depth
        self.up, self.down, self.least, self.most = up, down, least, most

    def plan(self, seq: Sequence) -> Plan:
        depth = seq.scratch.get(self, self.first)
        return Plan(self.nodes, depth)

    def observe(self, step: Step) -> None:
        for seq, tree, verdict in zip(step.seqs, step.trees, step.verdicts, strict=True):
            if len(tree):
                whole = len(verdict.nodes) == int(tree.depths.max())
                depth = seq.scratch.get(self, self.first) + (self.up if whole else -self.down)
                seq.scratch[self] = max(self.least, min(self.most, depth))

    def finish(self, seq: Sequence) -> None:
        seq.scratch.pop(self, None)
