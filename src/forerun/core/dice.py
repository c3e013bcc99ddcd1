"""All randomness of forerun: one small object that is passed as an argument.

`SeededDice` serves generation. `EnumeratedDice` runs a random program once per outcome, with
the probability of each, so tests can check losslessness as an equality. Kernels read the same
uniforms through `peek` and `skip`, so a kernel and its plain version agree draw by draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np

T = TypeVar("T")


class Dice(Protocol):
    """The random draws that growers and verifiers use."""

    def choice(self, probs: np.ndarray) -> int:
        """An index drawn in proportion to probs [n], which need not be normalised."""

    def coin(self, heads: float) -> bool:
        """True with probability `heads`."""

    def without_replacement(self, probs: np.ndarray, count: int) -> list[int]:
        """Up to `count` distinct indices of positive probability, in the order drawn."""


class SeededDice:
    """Reproducible draws from one stream of uniforms in [0, 1)."""

    BLOCK = 1024

    def __init__(self, *seed: int) -> None:
        self._seed = seed
        self._rng: np.random.Generator | None = None  # made at the first draw
        self._block = np.empty(0)
        self._at = 0

    def peek(self, count: int) -> np.ndarray:
        """The next `count` uniforms [count], without consuming them."""
        missing = self._at + count - len(self._block)
        if missing > 0:
            if self._rng is None:
                seeds = np.random.SeedSequence(self._seed)
                self._rng = np.random.Generator(np.random.PCG64(seeds))
            fresh = self._rng.random(max(self.BLOCK, missing))
            self._block = np.concatenate([self._block[self._at :], fresh])
            self._at = 0
        return self._block[self._at : self._at + count]

    def skip(self, count: int) -> None:
        """Consumes `count` uniforms that were peeked at."""
        self._at += count

    def uniform(self) -> float:
        """One uniform in [0, 1)."""
        value = self.peek(1)[0]
        self._at += 1
        return float(value)

    def coin(self, heads: float) -> bool:
        return self.uniform() < heads

    def choice(self, probs: np.ndarray) -> int:
        sums = np.cumsum(probs, dtype=np.float64)
        index = int(np.searchsorted(sums, self.uniform() * sums[-1], side="right"))
        return index if index < len(sums) and probs[index] > 0 else int(np.flatnonzero(probs)[-1])

    def without_replacement(self, probs: np.ndarray, count: int) -> list[int]:
        """Exponential race: sorts -log(u) / p, which gives the Plackett-Luce order.

        The same as Gumbel-Top-k (Kool et al. 2019).
        """
        noise = -np.log1p(-self.peek(len(probs)))
        self._at += len(probs)
        arrival = np.divide(noise, probs, out=np.full(len(probs), np.inf), where=probs > 0)
        order = np.argsort(arrival, kind="stable")[:count]
        return [int(i) for i in order if probs[i] > 0]


class EnumeratedDice:
    """Enumerates all outcomes of a random program; `probability` is that of the current one."""

    def __init__(self) -> None:
        self._stack: list[tuple[np.ndarray, int]] = []
        self._at = 0
        self.probability = 1.0

    def choice(self, probs: np.ndarray) -> int:
        if self._at == len(self._stack):
            self._stack.append((np.flatnonzero(np.asarray(probs) > 1e-15), 0))
        support, k = self._stack[self._at]
        self._at += 1
        self.probability *= float(probs[support[k]] / np.sum(probs))
        return int(support[k])

    def coin(self, heads: float) -> bool:
        return self.choice(np.array([1.0 - heads, heads])) == 1

    def without_replacement(self, probs: np.ndarray, count: int) -> list[int]:
        left = np.array(probs, dtype=np.float64)
        drawn: list[int] = []
        while len(drawn) < count and np.any(left > 1e-15):
            drawn.append(self.choice(left))
            left[drawn[-1]] = 0.0
        return drawn

    def outcomes(self, program: Callable[[EnumeratedDice], T]) -> Iterator[tuple[T, float]]:
        """Runs `program` once for every outcome; yields its value and probability."""
        while True:
            self._at, self.probability = 0, 1.0
            value = program(self)
            yield value, self.probability
            while self._stack and self._stack[-1][1] == len(self._stack[-1][0]) - 1:
                self._stack.pop()
            if not self._stack:
                return
            support, k = self._stack.pop()
            self._stack.append((support, k + 1))
