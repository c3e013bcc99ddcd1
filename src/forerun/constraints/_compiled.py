"""Grammars compiled by llguidance, once per tokenizer.

Token bytes are those of our own detokenizer, so a match is a match of the text that the user sees.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from forerun.errors import ConfigError, DataError, in_a_line, install_extra

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from forerun.models.tokenizer import Tokenizer

MAX_COMPILED = 256  # grammars of a tokenizer
MAX_COMPILED_CHARS = 16 << 20  # of these grammars together
MAX_GRAMMAR_CHARS = 1 << 20
# work of one grammar and of one mask; the limits of a mask are about 0.05 s each
LIMITS = {
    "initial_lexer_fuel": 10_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,  # about 1 kB each
    "verbose_errors": False,
}
PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")  # of an error in a grammar
QUOTE = re.compile(r"\n +\d+ \| ")  # of the grammar, in an error
FULL = "lexer error: too many"  # begins the error of a lexer without room for more states
DEAD_END = "NoExtension"  # begins the error of a text that no token can continue
SPECIAL = b"\xff"  # prefix of special tokens, which match no text
EMPTY = "it allows no text at all; correct it"

_lock = Lock()
# a tenant must not learn from the time of compiling what others use: each has its own entries
cache_owner: ContextVar[str] = ContextVar("cache_owner", default="")


class Compiled:
    """A grammar and its matchers at the start of a text.

    Matchers share a lexer, which keeps the states that their texts needed. Raises DataError for a
    grammar that llguidance refuses, or that allows no text.
    """

    def __init__(self, vocabulary: LLTokenizer, grammar: str) -> None:
        self._vocabulary, self._grammar = vocabulary, grammar
        self.num_dropped = 0  # shared lexers so far
        self._start: LLMatcher | None = self.own_matcher()
        _check_not_empty(self._start.deep_copy())

    def matcher(self) -> LLMatcher:
        """A matcher with the shared lexer."""
        if self._start is None:
            self._start = self.own_matcher()
        return self._start.deep_copy()

    def own_matcher(self) -> LLMatcher:
        """A matcher with an empty lexer of its own. Raises DataError."""
        guidance = library()
        limits, grammar = guidance.LLParserLimits(**LIMITS), self._grammar + OPTIONS
        found = guidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if found.is_error():
            raise DataError(reason_of(found.get_error()))
        return found

    def drop_lexer(self) -> None:
        """Gives later matchers an empty lexer, since the shared one is full and of no more use."""
        self._start = None
        self.num_dropped += 1


def library() -> Any:
    """The llguidance package. Raises ConfigError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            f"grammars need the package llguidance; {install_extra('constraints')}"
        ) from None
    return llguidance


# every token that may continue the text is allowed; by default llguidance forces its own split of
# a text into tokens, which would change the law. The last line with an option holds.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'


class Cache:
    """The vocabularies and grammars of one tokenizer; the least recently used grammars go first."""

    def __init__(self) -> None:
        self.vocabularies: dict[int, LLTokenizer] = {}  # by size
        self._grammars: OrderedDict[tuple[str, int, str], Compiled] = OrderedDict()
        self._num_chars = 0

    def get(self, key: tuple[str, int, str]) -> Compiled | None:
        """The grammar of an owner, a size of the vocabulary and a text, if it is here."""
        if key in self._grammars:
            self._grammars.move_to_end(key)
        return self._grammars.get(key)

    def add(self, key: tuple[str, int, str], made: Compiled) -> Compiled:
        """Keeps a grammar; returns the one that is kept already, if there is one."""
        if (known := self.get(key)) is not None:
            return known
        self._grammars[key] = made
        self._num_chars += len(key[2])
        while len(self._grammars) > MAX_COMPILED or self._num_chars > MAX_COMPILED_CHARS:
            (*_, grammar), _ = self._grammars.popitem(last=False)
            self._num_chars -= len(grammar)
        return made


_caches: WeakKeyDictionary[Tokenizer, Cache] = WeakKeyDictionary()


def compiled(tokenizer: Tokenizer, vocab_size: int, grammar: str) -> Compiled:
    """A Lark grammar for a model's tokens; cached by content as long as the tokenizer lives.

    Raises DataError for a grammar that llguidance refuses, or that allows no text.
    """
    _check_size(grammar)
    key = cache_owner.get(), vocab_size, grammar
    with _lock:
        vocabulary = vocabulary_of(tokenizer, vocab_size)
        found = _caches[tokenizer].get(key)
    if found is not None:
        return found
    made = Compiled(vocabulary, grammar)  # other threads go on
    with _lock:
        return _caches[tokenizer].add(key, made)


def check_grammar(grammar: str) -> None:
    """Raises DataError for a grammar that llguidance refuses, or that allows no text.

    Needs no tokenizer.
    """
    _check_size(grammar)
    if refusal := refusal_of(grammar):
        raise DataError(refusal)
    guidance = library()
    limits, grammar = guidance.LLParserLimits(**LIMITS), grammar + OPTIONS
    matcher = guidance.LLMatcher(_bytes_alone(), grammar, log_level=0, limits=limits)
    if not matcher.is_error():  # as with special tokens, which only a model has
        _check_not_empty(matcher)


def refusal_of(grammar: str) -> str:
    """Why llguidance refuses a grammar; "" if it does not."""
    guidance = library()
    limits = guidance.LLParserLimits(**LIMITS)
    return reason_of(guidance.LLMatcher.validate_grammar(grammar + OPTIONS, limits=limits) or "")


def _check_not_empty(matcher: LLMatcher) -> None:
    """Raises DataError if no text is allowed from the start. Uses the matcher up."""
    with suppress(ValueError):  # as of a mask beyond a limit
        matcher.compute_bitmask()
    if matcher.get_error().startswith(DEAD_END):
        raise DataError(EMPTY)


@cache
def _bytes_alone() -> LLTokenizer:
    """A vocabulary with a token for each byte."""
    return library().LLTokenizer("byte")


def _check_size(grammar: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise DataError(
            f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are compiled"
        )


def reason_of(message: str) -> str:
    """The message of llguidance without its quote of the grammar and its marks, in a line."""
    plain = QUOTE.split(message)[0].split("<backtrace>")[0].replace("<non-verbose/>", "").strip()
    if plain.startswith("panic"):
        return "the grammar is too large or too deep for llguidance; simplify it"
    plain = plain.split("; increase limits.")[0]  # options that users do not have
    found = PLACE.match(plain)
    if found is not None:
        plain = f"line {found[1]}, column {found[2]}: {plain[found.end() :]}"
    return in_a_line(ValueError(plain)) if plain else ""


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """The tokens of a model as llguidance takes them. Raises ConfigError."""
    known = _caches.setdefault(tokenizer, Cache()).vocabularies
    if vocab_size not in known:
        guidance = library()
        # a copy, since the value of a weak key must not keep that key
        wrapper = guidance._tokenizer.TokenizerWrapper(_Vocabulary(copy(tokenizer), vocab_size))
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
