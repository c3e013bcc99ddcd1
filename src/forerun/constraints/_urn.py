"""Drawing tokens without replacement, exact down to tiny masses."""

from __future__ import annotations

import math

import numpy as np

from forerun.core.dice import Dice

MIN_MASS = 1e-4  # of what is left, relative to its largest token once; below: masses are rescaled


class Urn:
    """Token masses to draw from and to remove from; both cost about 2 sqrt(V).

    logp: log masses [V] up to a constant, float64, -inf where removed. log_total: their sum at the
    start.
    """

    def __init__(self, logp: np.ndarray) -> None:
        self.logp = np.array(logp, dtype=np.float64)
        self._width = math.isqrt(max(len(self.logp) - 1, 0)) + 1
        self._fill()
        self.log_total = self._log_mass()

    @property
    def is_empty(self) -> bool:
        return not self._mass > 0.0

    @property
    def log_left(self) -> float:
        """Log of the mass that is left, as a share of the whole."""
        return self._log_mass() - self.log_total

    def log_share(self, token: int) -> float:
        """Log of a token's mass as a share of the whole."""
        return float(self.logp[token]) - self.log_total

    def largest(self) -> tuple[int, float]:
        """The token with the largest mass, and its share of what is left."""
        if self.is_empty:
            return 0, 0.0
        top = int(self.logp.argmax())
        return top, math.exp(float(self.logp[top]) - self._log_mass())

    def draw(self, dice: Dice) -> int:
        """A token in proportion to its mass: first a row of the table, then one of the row."""
        row = dice.choice(self._row_sums)
        return row * self._width + dice.choice(self._rows[row])

    def remove(self, token: int) -> None:
        row, column = divmod(token, self._width)
        self.logp[token] = -np.inf
        self._rows[row, column] = 0.0
        self._row_sums[row] = self._rows[row].sum()  # no subtraction: small masses stay exact
        self._mass = float(self._row_sums.sum())
        if self._mass < MIN_MASS:
            self._fill()

    def _fill(self) -> None:
        """Masses relative to the largest one, in rows of equal width."""
        self._top = float(self.logp.max(initial=-np.inf))
        masses = np.full(-(-len(self.logp) // self._width) * self._width, -np.inf)
        if self._top > -np.inf:
            np.subtract(self.logp, self._top, out=masses[: len(self.logp)])
        np.exp(masses, out=masses)
        self._rows = masses.reshape(-1, self._width)
        self._row_sums = self._rows.sum(axis=1)
        self._mass = float(self._row_sums.sum())

    def _log_mass(self) -> float:
        return self._top + math.log(self._mass) if self._mass > 0.0 else -math.inf
