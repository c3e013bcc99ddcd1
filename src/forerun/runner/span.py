"""Rows of one sequence in a pass: cells, positions and visibility."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Span:
    """Rows of one sequence in a pass: the last `num_rows` of the cells [base, stop) of a slot.

    Every row sees the cells before `base`, where cell i is position i.
    """

    slot: int
    base: int
    places: np.ndarray  # int64 [stop - base], position per cell
    num_rows: int
    sees: np.ndarray | None = None  # bool [num_rows, stop - base]; None: causal
    past: np.ndarray | None = None  # int64 [base], positions of those cells; None: 0, 1, ...
    dropped: np.ndarray | None = None  # bool [layers, kv_heads, n <= base]: hidden from all rows

    @property
    def is_altered(self) -> bool:
        """Whether cells have explicit positions, or some are hidden."""
        return self.past is not None or self.dropped is not None

    def last(self, num: int) -> Span:
        """The span with only the last `num` cells as rows of the pass."""
        sees = None if self.sees is None else self.sees[len(self.sees) - num :]
        return replace(self, num_rows=num, sees=sees)

    @property
    def stop(self) -> int:
        return self.base + len(self.places)

    @property
    def start(self) -> int:
        """The first cell that the pass writes."""
        return self.stop - self.num_rows

    @property
    def positions(self) -> np.ndarray:
        """int64 [num_rows]."""
        return self.places[-self.num_rows :]

    def mask(self, low: int, high: int, window: int | None) -> np.ndarray:
        """Which cells of [low, high) the rows see, bool [num_rows, high - low]; low <= base."""
        cells = np.arange(low, high)
        mask = np.repeat(cells[None] < self.base, self.num_rows, axis=0)
        if self.past is not None:
            cells[: self.base - low] = self.past[low:high]
        if high > self.base:
            at = slice(self.base - low, self.stop - low)
            causal = np.tri(self.num_rows, len(self.places), self.start - self.base, dtype=bool)
            mask[:, at] = causal if self.sees is None else self.sees
            cells[at] = self.places
        if window is not None:
            mask &= self.positions[:, None] - cells < window
        return mask
