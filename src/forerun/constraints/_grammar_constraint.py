"""Base class of constraints that a grammar of llguidance describes."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from forerun.constraints._compiled import (
    Compiled,
    check_grammar,
    compiled,
    library,
    vocabulary_of,
)
from forerun.constraints._matcher import Cursor, State, Vocabulary
from forerun.constraints.base import Constraint
from forerun.core.records import Sequence
from forerun.errors import DataError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from forerun.models.tokenizer import Tokenizer


def text_of(file: str | Path) -> str:
    """The text of a file. Raises DataError."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text; save it as UTF-8") from None


class Ended(NamedTuple):
    """The state after an end token: only end tokens may follow."""

    text: State  # before it


class GrammarConstraint(Constraint):
    """Texts of a grammar. The generated text, without the prompt, must be one.

    Special tokens other than end tokens are forbidden. A text may be split into tokens in several
    ways; all of them are allowed.
    """

    _start: Compiled
    _tokenizer: LLTokenizer
    _vocabulary: Vocabulary
    _vocab_size: int
    _key: str  # once it was asked for
    _splits: dict[bytes, tuple[int, ...]]  # forced texts as tokens

    @abstractmethod
    def source(self) -> str:
        """The grammar in the Lark dialect of llguidance. Raises DataError."""

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Self:
        library()
        bound = super().bind(tokenizer, vocab_size)
        source = self.source()
        try:
            bound._start = compiled(tokenizer, vocab_size, source)
        except DataError as error:
            raise DataError(self.explained(str(error))) from None
        bound._tokenizer = vocabulary_of(tokenizer, vocab_size)
        bound._vocabulary = Vocabulary(tokenizer.token_bytes(vocab_size))
        bound._vocab_size, bound._splits = vocab_size, {}
        return bound

    def check(self) -> None:
        """Checks the grammar without a model. Raises DataError."""
        source = self.source()
        try:
            check_grammar(source)
        except DataError as error:
            raise DataError(self.explained(str(error))) from None

    def explained(self, message: str) -> str:
        """The message of an error for a source that llguidance refuses."""
        return f"the grammar cannot be used: {message}"

    def key(self) -> str:
        if "_key" not in vars(self):
            self._key = hashlib.sha256(self.source().encode()).hexdigest()
        return self._key

    def start(self, seq: Sequence) -> State | Ended:
        return self.after(seq.generated)

    def after(self, tokens: Many[int]) -> State | Ended:
        """The state after a text from its start."""
        state: State | Ended = Cursor(self._start, self._vocabulary).root
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
        text = state.cursor.forced(state)
        if not text:
            return self.eos_ids[:1] if state.cursor.must_end(state) else ()
        if text not in self._splits:
            self._splits[text] = self._split(text)
        return self._splits[text]

    def _split(self, text: bytes) -> tuple[int, ...]:
        """A text as tokens: by the tokenizer, or greedily if that changes the text."""
        vocabulary = self._tokenizer
        tokens = vocabulary.tokenize_bytes(text)
        if vocabulary.decode_bytes(tokens) != text:
            tokens = vocabulary.greedy_tokenize(text.decode(errors="ignore"))
        return tuple(tokens)

    def begin(self, text: bytes) -> State | None:
        tokens = self._split(text)
        if self._tokenizer.decode_bytes(list(tokens)) != text:
            return None  # part of a character, which no tokens spell
        return Cursor(self._start, self._vocabulary).begin(tokens)

    def error(self, state: State | Ended) -> str:
        text = state.text if isinstance(state, Ended) else state
        return text.cursor.error(text)

    def is_complete(self, state: State | Ended) -> bool:
        text = state.text if isinstance(state, Ended) else state
        return text.cursor.is_complete(text)
