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
    """The state after the marker. state: of `inner`; None if no allowed text begins so."""

    state: Any


class After(Constraint):
    """Applies `inner` to the text after the first occurrence of `marker` in the generated text.

    A token may end the marker and go on; it is forbidden unless its rest begins an allowed text.
    All other tokens are allowed up to the end of the marker. A text without the marker is not
    valid, unless `is_optional`.
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
        self._forbidden: dict[tuple[int, ...], list[int]] = {}

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Self:
        bound = super().bind(tokenizer, vocab_size)
        bound.inner = self.inner.bind(tokenizer, vocab_size)
        pieces, specials = tokenizer.token_bytes(vocab_size), tokenizer.specials
        bound._pieces = [
            piece or specials.get(token, "").encode() for token, piece in enumerate(pieces)
        ]
        bound._ends, bound._forbidden = _endings(bound._pieces, self.marker), {}
        return bound

    def key(self) -> str:
        return f"{self.marker.hex()}{'?' if self.is_optional else ''}:{self.inner.key()}"

    def start(self, seq: Sequence) -> Free | Inside:
        state: Free | Inside = Free(b"")
        for token in seq.generated:
            state = self.advance(state, token)
        return state

    def advance(self, state: Free | Inside, token: int) -> Free | Inside:
        if isinstance(state, Free):
            return self._after(state.tail + self._pieces[token])
        return state if state.state is None else Inside(self.inner.advance(state.state, token))

    def begin(self, text: bytes) -> Free | Inside | None:
        state = self._after(text)
        return state if isinstance(state, Free) or state.state is not None else None

    def _after(self, text: bytes) -> Free | Inside:
        """The state after a text without a marker before it."""
        at = text.find(self.marker)
        if at < 0:
            return Free(text[max(0, len(text) - len(self.marker) + 1) :])
        return Inside(self.inner.begin(text[at + len(self.marker) :]))

    def allowed(self, state: Free | Inside) -> np.ndarray:
        if isinstance(state, Free):
            found = np.ones(len(self._pieces), dtype=bool)
            found[self._forbidden_after(state.tail)] = False
            return found
        if state.state is None:
            return np.zeros(len(self._pieces), dtype=bool)
        return self.inner.allowed(state.state)

    def allows(self, state: Free | Inside, token: int) -> bool:
        if isinstance(state, Free):
            return token not in self._forbidden_after(state.tail)
        return state.state is not None and self.inner.allows(state.state, token)

    def forced(self, state: Free | Inside) -> Many[int]:
        if isinstance(state, Free) or state.state is None:
            return ()
        return self.inner.forced(state.state)

    def is_complete(self, state: Free | Inside) -> bool:
        if isinstance(state, Free):
            return self.is_optional
        return state.state is not None and self.inner.is_complete(state.state)

    def error(self, state: Free | Inside) -> str:
        if isinstance(state, Free) or state.state is None:
            return ""
        return self.inner.error(state.state)

    def missing(self, state: Free | Inside) -> str:
        if isinstance(state, Inside) or self.is_optional:
            return ""
        return f"the marker {self.marker.decode()!r} did not come"

    def _forbidden_after(self, tail: bytes) -> list[int]:
        """Tokens that end the marker and go on with a text that is not allowed."""
        lengths = tuple(n for n in self._ends if tail.endswith(self.marker[:n]))
        if lengths not in self._forbidden:
            # the marker that begins first counts: the one of which most stands in the tail
            rests = {token: rest for n in sorted(lengths) for token, rest in self._ends[n]}
            begins = {rest: self.inner.begin(rest) is not None for rest in set(rests.values())}
            self._forbidden[lengths] = [t for t, rest in rests.items() if not begins[rest]]
        return self._forbidden[lengths]


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
