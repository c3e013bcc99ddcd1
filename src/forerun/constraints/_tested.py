"""A constraint that is tested when tokens are drawn, instead of masked."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from forerun.constraints.base import Constraint
from forerun.core.records import Sequence


class Tested(Constraint):
    """The constraint `inner` for AWRS: logits stay, and `tests` is true (verifiers/awrs.py)."""

    def __init__(self, inner: Constraint) -> None:
        self.inner, self.eos_ids = inner, inner.eos_ids

    def start(self, seq: Sequence) -> Any:
        return self.inner.start(seq)

    def advance(self, state: Any, token: int) -> Any:
        return self.inner.advance(state, token)

    def logits(self, state: Any, logits: np.ndarray) -> np.ndarray:
        return logits

    def tests(self, state: Any) -> bool:
        return True

    def allowed(self, state: Any) -> np.ndarray:
        return self.inner.allowed(state)

    def allows(self, state: Any, token: int) -> bool:
        return self.inner.allows(state, token)

    def forced(self, state: Any) -> Many[int]:
        return self.inner.forced(state)

    def is_complete(self, state: Any) -> bool:
        return self.inner.is_complete(state)

    def error(self, state: Any) -> str:
        return self.inner.error(state)

    def begin(self, text: bytes) -> Any:
        return self.inner.begin(text)
