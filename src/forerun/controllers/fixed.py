"""The same plan at every step."""

from __future__ import annotations

from forerun.records import Plan, Sequence
from forerun.roles import Controller


class Fixed(Controller):
    """Always `nodes` nodes and `depth` levels, less where the sequence is about to end."""

    def __init__(self, *, nodes: int = 16, depth: int = 16) -> None:
        self.nodes, self.depth = nodes, depth

    def plan(self, seq: Sequence) -> Plan:
        return Plan(nodes=self.nodes, depth=min(self.depth, seq.num_left - 1))
