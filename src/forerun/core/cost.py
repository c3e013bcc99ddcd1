"""The cost model of a step; `engine/cost` measures it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

MAX_TABULATED_ROWS = 1024  # of `Cost.pass_time`


@dataclass(frozen=True)
class Cost:
    """Cost model of a step, in seconds: forward pass by number of rows, plus overhead.

    The pass time is linear between the measured row counts and beyond the last.
    """

    rows: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]  # of a pass of one sequence with that many rows
    per_step: float = 0.0  # overhead of every step
    per_seq: float = 0.0
    per_draft: float = 0.0  # for each sequence that drafts, without its rows
    fixed_draft: float = 0.0  # once per step in which any sequence drafts
    per_empty_draft: float = 0.0  # for each sequence with an empty draft
    fixed_empty: float = 0.0  # once per step in which all drafts are empty

    def at(self, rows: float | np.ndarray) -> np.ndarray:
        """Seconds of a pass with `rows` rows of one sequence."""
        within = np.interp(rows, self.rows, self.seconds)
        return within + np.maximum(np.subtract(rows, self.rows[-1]), 0) * self._last

    def pass_time(self, rows: int) -> float:
        """`at` for one number of rows, tabulated."""
        return self._table[rows] if rows < MAX_TABULATED_ROWS else float(self.at(rows))

    def overhead(self, seqs: float, drafts: float, empty: float = 0) -> float:
        """Seconds of a step of `seqs` sequences without its pass.

        drafts: mean number of sequences that draft. empty: number of empty drafts.
        """
        each = self.per_seq * seqs + self.per_draft * drafts
        drafting = self.fixed_draft * min(drafts, 1.0)
        if empty:
            drafting = max(drafting + self.per_empty_draft * empty, self.empty_draft_seconds(empty))
        return self.per_step + each + drafting

    def empty_draft_seconds(self, empty: float) -> float:
        """Seconds of `empty` empty drafts in one step without other drafts."""
        return self.fixed_empty * min(empty, 1.0) + self.per_empty_draft * empty

    @cached_property
    def _table(self) -> list[float]:
        return _pass_times(self.rows, self.seconds)

    @property
    def _last(self) -> float:
        (a, b), (x, y) = self.rows[-2:], self.seconds[-2:]
        return (y - x) / (b - a)


@lru_cache(maxsize=64)
def _pass_times(rows: tuple[int, ...], seconds: tuple[float, ...]) -> list[float]:
    """Seconds of passes over 0, 1, 2, ... rows."""
    return Cost(rows, seconds).at(np.arange(MAX_TABULATED_ROWS)).tolist()
