"""The matcher of a text, and its states at the nodes of draft trees.

A sequence has one matcher (`Cursor`); it moves between the nodes of a tree by rolling back to their
common beginning.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass, field
from time import thread_time

import numpy as np

from forerun.constraints._compiled import DEAD_END, FULL, Compiled, reason_of

# processor time that a text may use, which bounds the sum over the nodes of a draft tree
TEXT_SECONDS, TOKEN_SECONDS = 1.0, 0.02
MAX_FORCED_BYTES = 256  # a draft seldom holds more
MAX_FORCED_TOKENS = 256  # allowed tokens where the next byte is forced: the beginnings of one text
PROBES = b'ea "01{\n'  # where two of these bytes may follow, none is forced
OWN = -1  # number of a lexer that no other text uses


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

    A state that needs more work than LIMITS allow is given up, all are after TEXT_SECONDS. Both
    depend on this text only: where the shared lexer is full, the text gets a lexer of its own.
    """

    def __init__(self, grammar: Compiled, vocabulary: Vocabulary) -> None:
        self._grammar, self.vocabulary = grammar, vocabulary
        self._start, self._lexer = grammar.matcher(), grammar.num_dropped
        self._matcher = self._start.deep_copy()
        self._retried: State | None = None  # with an empty lexer
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
            if self._may_retry(state):
                return self.mask(state, vocab_size)
            self._give_up(state)
            packed = bytes(-(-vocab_size // 8))
        self._charge(start)
        self._retried = None
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        return bits[:vocab_size].view(bool)

    def allows(self, state: State, token: int) -> bool:
        """Whether a token may follow; it is no end token. False if that needs too much work.

        Only a mask or a token of the text gives a text up, so that drafts do not decide on it.
        """
        if not self._move(state):
            return False
        start = thread_time()
        is_allowed = self._matcher.validate_tokens([token]) == 1
        self._charge(start)
        if self._matcher.is_error():
            if self._may_retry(state):
                return self.allows(state, token)
            self._restart()
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
        if self._lexer not in (OWN, self._grammar.num_dropped):
            self._start, self._lexer = self._grammar.matcher(), self._grammar.num_dropped
            self._restart()
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
        self._at, illegal = here, None
        for here in reversed(path):
            if not here.is_legal or self._matcher.try_consume_tokens([here.token]) != 1:
                illegal = here
                break
            self._at = here
        if self._matcher.is_error():
            if self._may_retry(state):
                return self._move(state)
            self._give_up(illegal or self._at)
        if illegal is not None:
            illegal.is_legal = False
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

    def _may_retry(self, state: State) -> bool:
        """After an error: whether the lexer was full and is empty now, so that it may not be again.

        The lexer keeps states of other texts and drafts. What is given up must not depend on them,
        so a state is tried again with an empty lexer, once.
        """
        if not reason_of(self._matcher.get_error()).startswith(FULL):
            return False
        start, is_first = thread_time(), self._retried is not state
        if self._lexer == self._grammar.num_dropped:
            self._grammar.drop_lexer()
        self._start, self._lexer = self._grammar.own_matcher(), OWN
        self._retried = state if is_first else None
        if is_first:
            self._restart()
        self._charge(start)
        return is_first

    def _give_up(self, state: State) -> None:
        """Notes an error of the matcher at a state."""
        reason = reason_of(self._matcher.get_error())
        if not reason.startswith(DEAD_END):
            self._errors[state.tokens] = reason or "llguidance gave up"
        state.is_legal = False
        self._restart()

    def _restart(self) -> None:
        """Goes on with another matcher, since one with an error keeps it."""
        self._matcher, self._at = self._start.deep_copy(), self._root
