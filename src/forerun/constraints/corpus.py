"""Restricts text to passages of a corpus: allows only tokens that an FM-index has after the text.

The constraint of Bevilacqua et al., "Autoregressive Search Engines", 2022, for ordinary decoding.
The generated tokens must occur in the corpus; with `window`, every window + 1 tokens in a row must.
A state is the range of index rows that match the text.

Law: the target's, conditioned step by step on the allowed tokens (other logits become -inf). The
end id is allowed at the end of a document, and alone if no token is allowed; after it any document
may begin. Drafts keep this law exactly. Needs: an index made with the target's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from forerun import registry
from forerun.constraints.base import Constraint
from forerun.core.records import Sequence
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.ngrams.index.fm.index import FMIndex, Interval
from forerun.utils.numbers import whole

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

ANYWHERE, DOCUMENT, PROMPT = "anywhere", "document", "prompt"
BEGINNINGS = (ANYWHERE, DOCUMENT, PROMPT)
MAX_PROMPT_TOKENS = 16  # longest suffix of a prompt to search
MAX_CACHED_STATES = 1024


class State(NamedTuple):
    """Position of a text in the index."""

    rows: Interval
    tokens: tuple[int, ...]  # matched by the rows; only with a window


def check(begin: str, window: int | None) -> None:
    """Raises ConfigError for values out of range, UnknownName for an unknown `begin`."""
    if begin not in BEGINNINGS:
        raise UnknownName.of("beginning", begin, BEGINNINGS)
    if window is not None:
        whole("window (3 or more tokens are usual)", window)


class Corpus(Constraint):
    """Allows tokens that continue a passage of the index.

    index: an FM-index or its file. begin: where the text starts: "anywhere"; "document", at the
    start of a document; or "prompt", after the longest suffix of the prompt (at most 16 tokens)
    that occurs. window: number of previous tokens to match; None: all generated ones. tokenizer:
    the target's, for comparison.
    """

    _tokenizer: Tokenizer  # both from `bind`
    _vocab_size: int

    def __init__(
        self,
        index: registry.Corpus | FMIndex | Path,
        *,
        begin: str = ANYWHERE,
        window: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        check(begin, window)
        self.index = _opened(index, tokenizer)
        self.begins, self.window = begin, window
        self._next: dict[Interval, np.ndarray] = {}
        self._root = State(self.index.all, ())
        self._document = self._grown(self._root, self.index.eos)
        self.next(self._document)  # compiles the kernels

    @staticmethod
    def check_options(
        *, index: Any = None, begin: str = ANYWHERE, window: int | None = None
    ) -> None:
        """Checks options before the index is read. Raises ConfigError, DataError."""
        check(begin, window)
        if isinstance(index, str | Path) and not Path(index).is_file():
            what = "is a folder" if Path(index).is_dir() else "does not exist"
            raise DataError(
                f"{index} {what}; give a file made with `forerun index fm build` (an index of "
                "`forerun index build` is of another kind)"
            )

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Self:
        if self.index.largest_id >= vocab_size:
            raise ConfigError(
                f"the corpus has token {self.index.largest_id}, but the ids of this model end at "
                f"{vocab_size - 1}; index the text with the model's tokenizer"
            )
        self.key()  # which the copy keeps
        bound = copy(self)
        bound.eos_ids, bound._tokenizer, bound._vocab_size = (
            (self.index.eos,),
            tokenizer,
            vocab_size,
        )
        return bound

    def start(self, seq: Sequence) -> State:
        """The state after the prompt and the generated tokens."""
        state = self._after(seq.tokens[: seq.num_prompt])
        for token in seq.generated:
            state = self.advance(state, token)
        return state

    def _after(self, prompt: list[int]) -> State:
        """The state before the first generated token."""
        if self.begins == DOCUMENT:
            return self._document
        most = (
            min(MAX_PROMPT_TOKENS, self.window or MAX_PROMPT_TOKENS, len(prompt))
            if self.begins == PROMPT
            else 0
        )
        for length in range(most, 0, -1):
            tail = tuple(prompt[-length:])
            rows = self.index.find(tail)
            if rows[0] < rows[1]:
                return State(rows, tail if self.window else ())
        return self._root

    def advance(self, state: State, token: int) -> State:
        return self._document if token == self.index.eos else self._grown(state, token)

    def logits(self, state: State, logits: np.ndarray) -> np.ndarray:
        ids = self.next(state)
        shaped = np.full_like(logits, -np.inf)
        shaped[ids] = logits[ids]
        return shaped

    def allowed(self, state: State) -> np.ndarray:
        found = np.zeros(self._vocab_size, dtype=bool)
        found[self.next(state)] = True
        return found

    def allows(self, state: State, token: int) -> bool:
        return token in self.next(state)

    def forced(self, state: State) -> Many[int]:
        ids = self.next(state)
        return ids.tolist() if len(ids) == 1 else ()

    def is_complete(self, state: State) -> bool:
        return self.allows(state, self.index.eos)

    def begin(self, text: bytes) -> State | None:
        state = self._root if self.begins != DOCUMENT else self._document
        for token in self._tokenizer.encode_inside(text.decode(errors="ignore")):
            if not self.allows(state, token):
                return None
            state = self.advance(state, token)
        return state

    def next(self, state: State) -> np.ndarray:
        """The allowed ids, ascending; only the end id if there is no continuation."""
        rows = state.rows
        if rows not in self._next:
            if len(self._next) >= MAX_CACHED_STATES:
                del self._next[next(iter(self._next))]  # the oldest
            ids, _ = self.index.next_in(rows)
            self._next[rows] = ids if len(ids) else np.array([self.index.eos])
        return self._next[rows]

    def _grown(self, state: State, token: int) -> State:
        if self.window is None:
            return State(self.index.extend(state.rows, token), ())
        tokens = (*state.tokens, token)
        if len(tokens) <= self.window:
            return State(self.index.extend(state.rows, token), tokens)
        tokens = tokens[-self.window :]
        return State(self.index.find(tokens), tokens)


def _opened(index: FMIndex | str | Path, tokenizer: Tokenizer | None) -> FMIndex:
    """The index. Raises ConfigError if its tokenizer is not the target's (if both are known)."""
    from forerun.models.identity import tokenizer_hash

    code = tokenizer_hash(tokenizer) if tokenizer else ""
    if not isinstance(index, FMIndex):
        return FMIndex.load(index, code)
    index.check_tokenizer(code)
    return index
