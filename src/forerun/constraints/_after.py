"""A constraint on the text after a marker, such as the end of reasoning; before it text is free."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from forerun.constraints.base import Constraint
from forerun.core.records import Sequence
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer


class Free(NamedTuple):
    """The state before the end of the marker: the last bytes, which may be its beginning."""

    tail: bytes


class Inside(NamedTuple):
    """The state after the marker."""

    state: Any


class After(Constraint):
    """Applies `inner` to the text after the first occurrence of `marker` in the generated text.

    A token may end the marker and go on; then its rest must begin an allowed text, and other tokens
    of this kind are forbidden. Before the marker no other token is. A text without it is not valid,
    unless the marker `is_optional`.
    """

    def __init__(self, marker: str, inner: Constraint, *, is_optional: bool = False) -> None:
        if not marker:
            raise ConfigError("the marker of a constraint must not be empty")
        self.marker, self.inner, self.eos_ids = marker.encode(), inner, inner.eos_ids
        self.is_optional = is_optional
        self.has_cheap_mask = inner.has_cheap_mask
        self._pieces: list[bytes] = []
        # length of the marker's part before a token -> tokens that end it, and their rest
        self._ends: dict[int, list[tuple[int, bytes]]] = {}
        self._begun: dict[bytes, Any] = {}

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Self:
        bound = super().bind(tokenizer, vocab_size)
        bound.inner = self.inner.bind(tokenizer, vocab_size)
        pieces, specials = tokenizer.token_bytes(vocab_size), tokenizer.specials
        bound._pieces = [
            piece or specials.get(token, "").encode() for token, piece in enumerate(pieces)
        ]
        bound._ends, bound._begun = _endings(bound._pieces, self.marker), {}
        return bound

    def key(self) -> str:
        return f"{self.marker.hex()}:{self.inner.key()}"

    def start(self, seq: Sequence) -> Free | Inside:
        state: Free | Inside = Free(b"")
        for token in seq.generated:
            state = self.advance(state, token)
        return state

    def advance(self, state: Free | Inside, token: int) -> Free | Inside:
        if isinstance(state, Inside):
            return Inside(self.inner.advance(state.state, token))
        return self.begin(state.tail + self._pieces[token])

    def begin(self, text: bytes) -> Free | Inside:
        at = text.find(self.marker)
        if at < 0:
            return Free(text[max(0, len(text) - len(self.marker) + 1) :])
        return Inside(self.inner.begin(text[at + len(self.marker) :]))

    def allowed(self, state: Free | Inside) -> np.ndarray:
        if isinstance(state, Inside):
            return self.inner.allowed(state.state)
        found = np.ones(len(self._pieces), dtype=bool)
        found[self._forbidden(state.tail)] = False
        return found

    def allows(self, state: Free | Inside, token: int) -> bool:
        if isinstance(state, Inside):
            return self.inner.allows(state.state, token)
        return token not in self._forbidden(state.tail)

    def forced(self, state: Free | Inside) -> Many[int]:
        return self.inner.forced(state.state) if isinstance(state, Inside) else ()

    def is_complete(self, state: Free | Inside) -> bool:
        if isinstance(state, Free):
            return self.is_optional
        return self.inner.is_complete(state.state)

    def error(self, state: Free | Inside) -> str:
        if isinstance(state, Inside):
            return self.inner.error(state.state)
        return "" if self.is_optional else f"the marker {self.marker.decode()!r} did not come"

    def _forbidden(self, tail: bytes) -> list[int]:
        """Tokens that end the marker and go on with a text that is not allowed."""
        found = []
        for length, ends in self._ends.items():
            if tail.endswith(self.marker[:length]):
                found += [token for token, rest in ends if not self._may_begin(rest)]
        return found

    def _may_begin(self, rest: bytes) -> bool:
        if rest not in self._begun:
            self._begun[rest] = self.inner.begin(rest) is not None
        return self._begun[rest]


def _endings(pieces: Many[bytes], marker: bytes) -> dict[int, list[tuple[int, bytes]]]:
    """Tokens that end the marker and go on, by how much of it stands before them."""
    found: dict[int, list[tuple[int, bytes]]] = {}
    last = marker[-1:]
    for token, piece in enumerate(pieces):
        if not 0 <= piece.find(last) < len(piece) - 1:  # most tokens
            continue
        for length in range(1, len(marker)):
            if piece.startswith(marker[length:]) and len(piece) > len(marker) - length:
                found.setdefault(length, []).append((token, piece[len(marker) - length :]))
        at = piece.find(marker)
        if at >= 0 and len(piece) > at + len(marker):
            found.setdefault(0, []).append((token, piece[at + len(marker) :]))
    return found
