"""Grammars compiled by llguidance, and their states at the nodes of draft trees.

A grammar is compiled once per tokenizer. A sequence has one matcher (`Cursor`); it moves between
the nodes of a tree by rolling back to their common beginning. Token bytes are those of our own
detokenizer, so a match is a match of the text that the user sees.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence as Many
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from forerun.errors import ConfigError, DataError, in_a_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from forerun.models.tokenizer import Tokenizer

MAX_COMPILED = 256  # grammars
MAX_GRAMMAR_CHARS = 1 << 20
# work of one grammar and of one mask; the limits of a mask are about 0.05 s each
LIMITS = {
    "initial_lexer_fuel": 10_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,  # about 1 kB each, for each text
    "verbose_errors": False,
}
PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")  # of an error in a grammar
QUOTE = re.compile(r"\n +\d+ \| ")  # of the grammar, in an error
# processor time that a text may use, which bounds the sum over the nodes of a draft tree
TEXT_SECONDS, TOKEN_SECONDS = 1.0, 0.02
MAX_FORCED_BYTES = 256  # a draft seldom holds more
MAX_FORCED_TOKENS = 256  # allowed tokens where the next byte is forced: the beginnings of one text
PROBES = b'ea "01{\n'  # where two of these bytes may follow, none is forced
DEAD_END = "NoExtension"  # begins the error of a text that no token can continue
SPECIAL = b"\xff"  # prefix of special tokens, which match no text

_vocabularies: WeakKeyDictionary[Tokenizer, dict[int, LLTokenizer]] = WeakKeyDictionary()
_compiled: OrderedDict[tuple[str, LLTokenizer, str], LLMatcher] = OrderedDict()
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
# a text into tokens, which would change the law. The last line with an option holds.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'


def compiled(tokenizer: Tokenizer, vocab_size: int, grammar: str) -> LLMatcher:
    """The matcher of a Lark grammar at the start of a text; copy it before use. Cached by content.

    Raises DataError for a grammar that llguidance refuses.
    """
    _check_size(grammar)
    with _lock:
        vocabulary = vocabulary_of(tokenizer, vocab_size)
        key = cache_owner.get(), vocabulary, grammar
        found = _compiled.get(key)
    if found is None:
        found = _made(vocabulary, grammar)  # other threads go on
    with _lock:
        found = _compiled.setdefault(key, found)
        _compiled.move_to_end(key)
        if len(_compiled) > MAX_COMPILED:
            _compiled.popitem(last=False)
        return found


def check_grammar(grammar: str) -> None:
    """Raises DataError for a grammar that llguidance refuses; needs no tokenizer."""
    _check_size(grammar)
    guidance = library()
    limits = guidance.LLParserLimits(**LIMITS)
    if refusal := guidance.LLMatcher.validate_grammar(grammar + OPTIONS, limits=limits):
        raise DataError(_reason(refusal))


def _made(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    guidance = library()
    limits = guidance.LLParserLimits(**LIMITS)
    found = guidance.LLMatcher(vocabulary, grammar + OPTIONS, log_level=0, limits=limits)
    if found.is_error():
        raise DataError(_reason(found.get_error()))
    return found


def _check_size(grammar: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise DataError(
            f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are compiled"
        )


def _reason(message: str) -> str:
    """The message of llguidance without its quote of the grammar and its marks, in a line."""
    plain = QUOTE.split(message)[0].replace("<non-verbose/>", "").strip()
    found = PLACE.match(plain)
    if found is not None:
        plain = f"line {found[1]}, column {found[2]}: {plain[found.end() :]}"
    return in_a_line(ValueError(plain)) if plain else ""


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


class Vocabulary:
    """The bytes of tokens, to look for forced text.

    pieces: of each token; None for special ones.
    """

    def __init__(self, pieces: Many[bytes | None]) -> None:
        self.pieces = pieces
        single = {piece: i for i, piece in enumerate(pieces) if piece and len(piece) == 1}
        self.probes = [single[byte] for one in PROBES if (byte := bytes([one])) in single]

    def common(self, tokens: Many[int]) -> int | None:
        """The token that all `tokens` begin with, if one of them does."""
        if not 0 < len(tokens) <= MAX_FORCED_TOKENS:
            return None
        found = [self.pieces[token] for token in tokens]
        shortest = min((piece or b"" for piece in found), key=len)
        if not shortest or not all(piece and piece.startswith(shortest) for piece in found):
            return None
        return tokens[found.index(shortest)]


@dataclass(eq=False, slots=True)
class State:
    """A text that a matcher has read: the text above and one more token."""

    cursor: Cursor = field(repr=False)
    above: State | None = field(default=None, repr=False)
    token: int = -1
    depth: int = 0
    is_legal: bool = True  # whether the grammar allows the text; known once the cursor was here
    forced: bytes | None = None  # bytes that must follow, once they were looked for

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the text."""
        found: list[int] = []
        here = self
        while here.above is not None:
            found.append(here.token)
            here = here.above
        return tuple(reversed(found))

    def then(self, token: int) -> State:
        """The state after one more token."""
        piece, forced = self.cursor.vocabulary.pieces[token], self.forced
        is_inside = forced and piece and len(piece) < len(forced) and forced.startswith(piece)
        rest = forced[len(piece) :] if forced and piece and is_inside else None
        return State(self.cursor, self, token, self.depth + 1, self.is_legal, forced=rest)


class Cursor:
    """The matcher of one sequence.

    A state that needs more work than LIMITS allow is given up, all are after TEXT_SECONDS.
    """

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary) -> None:
        self._start, self._matcher = start, start.deep_copy()
        self.vocabulary = vocabulary
        self._root = self._at = State(self)
        self._seconds, self._depth = 0.0, 0  # used, and of the longest text
        self._timeout = ""  # the error of all states, once the time is used up
        self._errors: dict[tuple[int, ...], str] = {}  # of texts that were given up

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
        start, packed = thread_time(), b""
        with suppress(ValueError):  # it may also return a mask that allows end tokens only
            packed = self._matcher.compute_bitmask()
        if not packed or self._matcher.is_error():
            self._give_up(state)
            packed = bytes(-(-vocab_size // 8))
        self._charge(start)
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        return bits[:vocab_size].view(bool)

    def allows(self, state: State, token: int) -> bool:
        """Whether a token may follow; it is no end token."""
        if not self._move(state):
            return False
        start = thread_time()
        is_allowed = self._matcher.validate_tokens([token]) == 1
        self._charge(start)
        return is_allowed

    def forced(self, state: State) -> bytes:
        """The bytes that must follow, up to MAX_FORCED_BYTES and one token.

        llguidance computes them without a limit, so some grammars never let it return.
        """
        if state.forced is None:
            found, here = b"", state
            while len(found) < MAX_FORCED_BYTES:
                token = self._forced_token(here)
                if token is None:
                    break
                found, here = found + (self.vocabulary.pieces[token] or b""), here.then(token)
            state.forced = found
        return state.forced

    def _forced_token(self, state: State) -> int | None:
        """The shortest token that every allowed text begins with."""
        num_allowed = 0
        for token in self.vocabulary.probes:
            num_allowed += self.allows(state, token)
            if num_allowed > 1:
                return None
        allowed = self.mask(state, len(self.vocabulary.pieces))
        return self.vocabulary.common(np.flatnonzero(allowed).tolist())

    def must_end(self, state: State) -> bool:
        """Whether the text is a whole one that cannot go on."""
        return self._move(state) and self._matcher.is_stopped()

    def is_complete(self, state: State) -> bool:
        """Whether the text is a whole one of the grammar."""
        return self._move(state) and self._matcher.is_accepting()

    def error(self, state: State) -> str:
        """Why a text was given up, if it was."""
        if self._timeout or not self._errors:
            return self._timeout
        tokens = state.tokens
        starts = (why for start, why in self._errors.items() if tokens[: len(start)] == start)
        return next(starts, "")

    def _move(self, state: State) -> bool:
        """Moves the matcher to a state; returns whether the grammar allows it."""
        if self._timeout:
            return False
        start = thread_time()
        path: list[State] = []
        here, there, num_back = self._at, state, 0  # until they meet
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
        for here in reversed(path):
            here.is_legal = here.is_legal and self._matcher.try_consume_tokens([here.token]) == 1
            if not here.is_legal:
                break
            self._at = here
        if self._matcher.is_error():
            self._give_up(here)
        self._charge(start)
        return self._at is state and state.is_legal

    def _charge(self, start: float) -> None:
        """Adds the processor time since `start`; gives all up if too much was used."""
        self._seconds += thread_time() - start
        self._depth = max(self._depth, self._at.depth)
        if self._seconds > TEXT_SECONDS + TOKEN_SECONDS * self._depth:
            self._timeout = (
                f"the grammar used {self._seconds:.1f} s of processor time for {self._depth} "
                "tokens; simplify it"
            )

    def _give_up(self, state: State) -> None:
        """Notes an error of the matcher, which never leaves it, and starts another."""
        reason = _reason(self._matcher.get_error())
        if not reason.startswith(DEAD_END):
            self._errors[state.tokens] = reason or "llguidance gave up"
        state.is_legal = False
        self._matcher, self._at = self._start.deep_copy(), self._root
