"""The same plan at every step."""

from __future__ import annotations

from forerun.errors import ConfigError
from forerun.records import Plan, Sequence
from forerun.roles import Controller


class Fixed(Controller):
    """Always `nodes` nodes and `depth` levels."""

    def __init__(self, *, nodes: int = 8, depth: int = 16) -> None:
        if min(nodes, depth) < 0:
            raise ConfigError(f"nodes and depth must be at least 0, got {nodes} and {depth}")
        self._plan = Plan(nodes, depth)

    def plan(self, seq: Sequence) -> Plan:
        return self._plan
