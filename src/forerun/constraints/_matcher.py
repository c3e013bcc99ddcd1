"""Grammars compiled by llguidance, and their states at the nodes of draft trees.

A grammar is compiled once per tokenizer. A sequence has one matcher (`Cursor`); it moves between
the nodes of a tree by rolling back to their common beginning. Token bytes are those of our own
detokenizer, so a match is a match of the text that the user sees.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from forerun.errors import ConfigError, DataError, in_a_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from forerun.models.tokenizer import Tokenizer

MAX_COMPILED = 256  # grammars
MAX_GRAMMAR_CHARS = 1 << 20
# work that one grammar may cause; llguidance does about 50,000 units of lexer fuel in a millisecond
LIMITS = {
    "initial_lexer_fuel": 10_000_000,
    "step_lexer_fuel": 500_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}
SPECIAL = b"\xff"  # prefix of special tokens, which match no text

_vocabularies: WeakKeyDictionary[Tokenizer, dict[int, LLTokenizer]] = WeakKeyDictionary()
_compiled: OrderedDict[tuple[str, int, str], LLMatcher] = OrderedDict()
_lock = Lock()
# a tenant must not learn from the time of compiling what others use: each has its own entries
cache_owner: ContextVar[str] = ContextVar("cache_owner", default="")


def library() -> Any:
    """The llguidance package. Raises ConfigError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "grammars need llguidance; install it with: pip install 'forerun[constraints]'"
        ) from None
    return llguidance


# every token that may continue the text is allowed; by default llguidance forces its own split of
# a text into tokens, which would change the law
OPTIONS = '%llguidance {"no_forcing": true}\n'


def compiled(tokenizer: Tokenizer, vocab_size: int, grammar: str) -> LLMatcher:
    """The matcher of a Lark grammar at the start of a text; copy it before use. Cached by content.

    Raises DataError for a grammar that llguidance refuses.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise DataError(
            f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are compiled"
        )
    with _lock:
        vocabulary = vocabulary_of(tokenizer, vocab_size)
        key = cache_owner.get(), id(vocabulary), grammar
        found = _compiled.get(key)
    if found is None:
        found = _made(vocabulary, grammar)  # other threads go on
    with _lock:
        found = _compiled.setdefault(key, found)
        _compiled.move_to_end(key)
        if len(_compiled) > MAX_COMPILED:
            _compiled.popitem(last=False)
        return found


def _made(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    guidance = library()
    limits = guidance.LLParserLimits(**LIMITS)
    if "%llguidance" not in grammar:
        grammar = OPTIONS + grammar
    found = guidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if found.is_error():
        reason = found.get_error().split("\n   1 | ")[0]  # then it quotes the grammar
        raise DataError(in_a_line(ValueError(reason)))
    return found


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """The tokens of a model as llguidance takes them. Raises ConfigError."""
    known = _vocabularies.setdefault(tokenizer, {})
    if vocab_size not in known:
        guidance = library()
        wrapper = guidance._tokenizer.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
        known[vocab_size] = guidance.LLTokenizer(
            wrapper, n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids)
        )
    return known[vocab_size]


class _Vocabulary:
    """The tokenizer interface of llguidance."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], None
        self.special_token_ids = [i for i in tokenizer.specials if i < vocab_size]
        self.tokens = [piece or b"" for piece in tokenizer.token_bytes(vocab_size)]
        for i in {*self.special_token_ids, *tokenizer.eos_ids}:
            self.tokens[i] = SPECIAL + tokenizer.specials.get(i, f"<{i}>").encode()
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Ids of a text that continues another."""
        return self._tokenizer.encode_inside(text)


@dataclass(eq=False, slots=True)
class State:
    """A text that a matcher has read: the text above and one more token."""

    cursor: Cursor = field(repr=False)
    above: State | None = field(default=None, repr=False)
    token: int = -1
    depth: int = 0
    is_legal: bool = True  # whether the grammar allows the text; known once the cursor was here

    def then(self, token: int) -> State:
        """The state after one more token."""
        return State(self.cursor, self, token, self.depth + 1, self.is_legal)


class Cursor:
    """The matcher of one sequence.

    error: what llguidance reported when a text needed more work than LIMITS allow.
    """

    def __init__(self, start: LLMatcher) -> None:
        self._start, self._matcher = start, start.deep_copy()
        self._root = self._at = State(self)
        self.error = ""

    @property
    def root(self) -> State:
        """The state before any token."""
        return self._root

    def begin(self, tokens: Many[int]) -> State | None:
        """The state after the first tokens of a text; None if the grammar forbids them."""
        state = self._root
        for token in tokens:
            state = state.then(token)
        return state if self._move(state) else None

    def mask(self, state: State, vocab_size: int) -> np.ndarray:
        """The tokens that may follow, bool [V]."""
        if not self._move(state):
            return np.zeros(vocab_size, dtype=bool)
        try:
            packed = self._matcher.compute_bitmask()
        except ValueError as error:
            self._give_up(error)
            return np.zeros(vocab_size, dtype=bool)
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        return bits[:vocab_size].view(bool)

    def allows(self, state: State, token: int) -> bool:
        """Whether a token may follow; it is no end token."""
        return self._move(state) and self._matcher.validate_tokens([token]) == 1

    def forced(self, state: State) -> bytes:
        """The bytes that must follow."""
        return self._matcher.compute_ff_bytes() if self._move(state) else b""

    def must_end(self, state: State) -> bool:
        """Whether the text is a whole one that cannot go on."""
        return self._move(state) and self._matcher.is_stopped()

    def is_complete(self, state: State) -> bool:
        """Whether the text is a whole one of the grammar."""
        return self._move(state) and self._matcher.is_accepting()

    def _move(self, state: State) -> bool:
        """Moves the matcher to a state; returns whether the grammar allows it."""
        path: list[State] = []
        here, there, num_back = self._at, state, 0
        while here is not there:
            if there.depth >= here.depth:
                path.append(there)
                assert there.above is not None
                there = there.above
            else:
                num_back += 1
                assert here.above is not None
                here = here.above
        if num_back:
            self._matcher.rollback(num_back)
        self._at = here
        for one in reversed(path):
            one.is_legal = one.is_legal and self._matcher.try_consume_tokens([one.token]) == 1
            if not one.is_legal:
                return False
            self._at = one
        return not self._failed()

    def _failed(self) -> bool:
        if self._matcher.is_error():
            self._give_up(ValueError(self._matcher.get_error()))
            return True
        return False

    def _give_up(self, error: ValueError) -> None:
        """Notes an error of the matcher, which never leaves it, and starts another."""
        self.error = self.error or in_a_line(error)
        self._at.is_legal = False
        self._matcher, self._at = self._start.deep_copy(), self._root
