"""Base class of constraints that a grammar of llguidance describes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from forerun.constraints._matcher import Cursor, State, compiled, library, vocabulary_of
from forerun.constraints.base import Constraint
from forerun.core.records import Sequence
from forerun.errors import DataError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from forerun.models.tokenizer import Tokenizer


def text_of(file: str | Path) -> str:
    """The text of a file. Raises DataError."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text") from None


class Ended(NamedTuple):
    """The state after an end token: only end tokens may follow."""

    text: State  # before it


class GrammarConstraint(Constraint):
    """Texts of a grammar. The generated text, without the prompt, must be one.

    Special tokens other than end tokens are forbidden. A text may be split into tokens in several
    ways; all of them are allowed.
    """

    _start: LLMatcher
    _vocabulary: LLTokenizer
    _vocab_size: int

    @abstractmethod
    def source(self) -> str:
        """The grammar as llguidance reads it. Raises DataError."""

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Self:
        library()
        bound = super().bind(tokenizer, vocab_size)
        bound._start = compiled(tokenizer, vocab_size, self.source())
        bound._vocabulary = vocabulary_of(tokenizer, vocab_size)
        bound._vocab_size = vocab_size
        return bound

    def start(self, seq: Sequence) -> State | Ended:
        return self.after(seq.generated)

    def after(self, tokens: Many[int]) -> State | Ended:
        """The state after a text from its start."""
        state: State | Ended = Cursor(self._start).root
        for token in tokens:
            state = self.advance(state, token)
        return state

    def advance(self, state: State | Ended, token: int) -> State | Ended:
        if isinstance(state, Ended):
            return state
        return Ended(state) if token in self.eos_ids else state.then(token)

    def allowed(self, state: State | Ended) -> np.ndarray:
        if isinstance(state, State):
            return state.cursor.mask(state, self._vocab_size)
        only_end = np.zeros(self._vocab_size, dtype=bool)
        only_end[list(self.eos_ids)] = True
        return only_end

    def allows(self, state: State | Ended, token: int) -> bool:
        if token in self.eos_ids:
            return self.is_complete(state)
        return isinstance(state, State) and state.cursor.allows(state, token)

    def forced(self, state: State | Ended) -> Many[int]:
        if isinstance(state, Ended):
            return ()
        run = state.cursor.forced(state)
        return self.eos_ids[:1] if not run and state.cursor.must_end(state) else run

    def begin(self, text: bytes) -> State | None:
        cursor = Cursor(self._start)
        tokens = self._vocabulary.tokenize_bytes(text)
        return cursor.begin(tokens)

    def error(self, state: State | Ended) -> str:
        return (state.text if isinstance(state, Ended) else state).cursor.error

    def is_complete(self, state: State | Ended) -> bool:
        text = state.text if isinstance(state, Ended) else state
        return text.cursor.is_complete(text)
