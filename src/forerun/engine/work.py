"""What one sequence brings to a pass: tokens that are not yet computed, and nodes of a tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numba import njit

from forerun.engine.attention import Span
from forerun.engine.cache import Slot

NO_NODES = np.zeros(0, dtype=np.int32)


@dataclass
class Work:
    """Rows of one sequence in a pass: pending tokens, then new scratch nodes.

    Law of order: cells of a slot are committed tokens, pending ones, then scratch nodes, oldest
    first; pending tokens come only into a slot without scratch. `scratch` int32 [m] holds the
    parents of all m scratch nodes, old and new.
    """

    slot: Slot
    pending: list[int]
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scratch: np.ndarray = field(default_factory=lambda: NO_NODES)

    @property
    def num_rows(self) -> int:
        return len(self.pending) + len(self.nodes)

    @property
    def first(self) -> int:
        """The first row whose logits are wanted: the root, or the first node."""
        return max(len(self.pending) - 1, 0)

    @cached_property
    def span(self) -> Span:
        """Cells, positions and visibility of the rows."""
        base, num, rows = len(self.slot.tokens), len(self.pending), self.num_rows
        if not len(self.scratch):
            return Span(self.slot.index, base, np.arange(base, base + num), rows)
        places, sees = lay_out(base, num, self.scratch, rows)
        return Span(self.slot.index, base, places, rows, sees)

    def keep(self) -> None:
        """The rows have been computed: pending tokens are committed, new nodes are scratch."""
        if self.pending:
            self.slot.clear_scratch()
            self.slot.tokens += self.pending
        if self.nodes:
            self.slot.add(self.nodes, self.parents)


@njit(cache=True, nogil=True)
def lay_out(base: int, num: int, parents: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions int64 [c] of the cells from `base` on, and which of them the last `rows` see.

    The c cells are `num` pending tokens, each of which sees those before it, and one per entry of
    `parents`; a node sees the pending tokens, its ancestors and itself. bool [rows, c].
    """
    count = num + len(parents)
    places, sees = np.empty(count, np.int64), np.zeros((count, count), np.bool_)
    for cell in range(num):
        places[cell] = base + cell
        sees[cell, : cell + 1] = True
    for cell in range(num, count):
        above = num + parents[cell - num]  # num - 1: the root
        if above < num:
            places[cell] = base + num
            sees[cell, :num] = True
        else:
            places[cell] = places[above] + 1
            sees[cell, : above + 1] = sees[above, : above + 1]
        sees[cell, cell] = True
    return places, sees[count - rows :]


def warm_up() -> None:
    """Compiles the kernel, or loads it from the cache."""
    lay_out(0, 1, NO_NODES, 1)
