"""The Task role: numbered examples and a checker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Example:
    """One problem: what the model is shown, and what a right solution ends in."""

    id: str
    prompt: str
    answer: str
    level: int = 0
    reference: str = ""


@runtime_checkable
class Task(Protocol):
    """Examples by index, always the same ones, and a score in [0, 1] for a written solution."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def example(self, i: int) -> Example:
        """The i-th example."""
        ...

    def score(self, example: Example, text: str) -> float:
        """1.0 where the text solves the example, 0.0 where not, between for partial credit."""
        ...
