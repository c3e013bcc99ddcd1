"""The same plan at every step."""

from __future__ import annotations

from forerun.core.records import Plan, Sequence
from forerun.core.roles import Controller
from forerun.errors import ConfigError

MAX_NODES = 1024  # of a tree; a target has as many KV cells beyond its context


class Fixed(Controller):
    """Always `nodes` nodes and `depth` levels."""

    def __init__(self, *, nodes: int = 8, depth: int = 16) -> None:
        if min(nodes, depth) < 0 or nodes > MAX_NODES:
            raise ConfigError(
                f"fixed needs 0 to {MAX_NODES} nodes and a depth of at least 0, got {nodes=} and "
                f"{depth=}; 8 to 64 nodes are usual"
            )
        self._plan = Plan(nodes, depth)

    def plan(self, seq: Sequence) -> Plan:
        return self._plan
