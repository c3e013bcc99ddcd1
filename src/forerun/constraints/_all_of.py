"""Several constraints at once."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from forerun.constraints.base import Constraint
from forerun.core.records import Sequence


class AllOf(Constraint):
    """Allows the texts that all of `parts` allow; they are bound to one model."""

    def __init__(self, parts: Many[Constraint]) -> None:
        self.parts, self.eos_ids = tuple(parts), parts[0].eos_ids
        self.has_cheap_mask = all(part.has_cheap_mask for part in parts)

    def key(self) -> str:
        return "+".join(part.key() for part in self.parts)

    def start(self, seq: Sequence) -> tuple[Any, ...]:
        return tuple(part.start(seq) for part in self.parts)

    def advance(self, state: tuple[Any, ...], token: int) -> tuple[Any, ...]:
        return tuple(part.advance(one, token) for part, one in self._pairs(state))

    def allowed(self, state: tuple[Any, ...]) -> np.ndarray:
        return np.logical_and.reduce([part.allowed(one) for part, one in self._pairs(state)])

    def allows(self, state: tuple[Any, ...], token: int) -> bool:
        return all(part.allows(one, token) for part, one in self._pairs(state))

    def forced(self, state: tuple[Any, ...]) -> Many[int]:
        return next((run for part, one in self._pairs(state) if (run := part.forced(one))), ())

    def is_complete(self, state: tuple[Any, ...]) -> bool:
        return all(part.is_complete(one) for part, one in self._pairs(state))

    def error(self, state: tuple[Any, ...]) -> str:
        return next((text for part, one in self._pairs(state) if (text := part.error(one))), "")

    def missing(self, state: tuple[Any, ...]) -> str:
        return next((text for part, one in self._pairs(state) if (text := part.missing(one))), "")

    def begin(self, text: bytes) -> tuple[Any, ...] | None:
        states = tuple(part.begin(text) for part in self.parts)
        return None if None in states else states

    def _pairs(self, state: tuple[Any, ...]) -> zip[tuple[Constraint, Any]]:
        return zip(self.parts, state, strict=True)
