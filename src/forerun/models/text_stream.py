"""Incremental detokenization: the text of tokens that follow other tokens.

One list of tokens has one text: `Tokenizer.decode`, a stream in any blocks, and a stream that
continues after a context give the same characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from forerun.models.token_bytes import ByteRule, ByteText

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

BROKEN = "\ufffd"  # decoded from an incomplete UTF-8 sequence
MAX_PENDING = 4  # tokens; a character has at most four bytes
CONTEXT_BYTES = 8  # before a stream: more than an incomplete character and a stripped start
CONTEXT_TOKENS = 8  # the same for tokenizers without bytes
MAX_WINDOW = 16  # tokens


class TextStream:
    """An incremental detokenizer: its joined outputs equal `decode` of all tokens.

    tokenizer: a `Tokenizer`, or any object with `decode`. context: tokens before. Their text and
    the stream's equal `decode` of all tokens. If the context ends within a character that the
    stream completes, the stream begins with the whole character.
    """

    def __init__(self, tokenizer: Tokenizer | Any, context: Many[int] = ()) -> None:
        self.specials: Mapping[int, str] = getattr(tokenizer, "specials", {})  # without text
        pieces = getattr(tokenizer, "pieces", None)
        self._inner: _ByteStream | _WindowStream
        if pieces is None:
            self._inner = _WindowStream(getattr(tokenizer, "decode_plain", tokenizer.decode))
        else:
            self._inner = _ByteStream(pieces)
        if context:
            self.begin(context)

    def begin(self, context: Many[int]) -> None:
        """Starts after these tokens; their text is not part of the output."""
        self._inner.begin(context, self.specials)

    def begin_inside(self) -> None:
        """Starts within a text: a leading space of the first token is kept."""
        self._inner.begin_inside()

    def push(self, token: int) -> str:
        """The text completed by this token; empty while a character is incomplete."""
        return "" if token in self.specials else self._inner.push(token)

    def extend(self, tokens: Many[int]) -> str:
        """The joined results of `push` for each token."""
        return self._inner.extend([token for token in tokens if token not in self.specials])

    def flush(self) -> str:
        """The remaining text, with incomplete characters as decoded."""
        return self._inner.flush()


class TokenPieces:
    """The bytes of the tokens of a `tokenizers` tokenizer."""

    def __init__(self, backend: Any, rule: ByteRule) -> None:
        self.rule, self._backend = rule, backend
        self._known: dict[tuple[int, bool], bytes | None] = {}

    def __call__(self, token: int, is_first: bool = False) -> bytes | None:
        """The bytes of a token; None for an id without a token."""
        key = token, is_first
        if key not in self._known:
            name = self._backend.id_to_token(token) if token >= 0 else None
            self._known[key] = None if name is None else self.rule.piece(name, is_first)
        return self._known[key]


class _ByteStream:
    """A stream for tokens with fixed bytes."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces, self._text = pieces, ByteText(pieces.rule)

    def begin(self, context: Many[int], specials: Mapping[int, str]) -> None:
        tail: list[int] = []
        num_bytes = 0
        for token in reversed(context):
            if token in specials:
                continue
            if num_bytes >= CONTEXT_BYTES + 4 * self._pieces.rule.strip[1]:
                self._text.skip_start()  # more text stands before the tail
                break
            tail.append(token)
            num_bytes += len(self._pieces(token) or b"")
        self.extend(tail[::-1])
        self._text.skip_broken()

    def begin_inside(self) -> None:
        self._text.skip_start()

    def push(self, token: int) -> str:
        return self.extend([token])

    def extend(self, tokens: Many[int]) -> str:
        found = []
        for token in tokens:
            piece = self._pieces(token, self._text.is_first)
            if piece is not None:
                found.append(piece)
                self._text.is_first = False
        return self._text.push(b"".join(found)) if found else ""

    def flush(self) -> str:
        return self._text.flush()


class _WindowStream:
    """A stream for any other tokenizer: a window of the last tokens is decoded again.

    The text of a token may depend on the token before it (leading spaces, bytes of one character).
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window
        self._known = 0  # number of ids of the window with text already returned
        self._text = ""  # the text of these ids
        self._num_shown = 0  # U+FFFD at the end of the context

    def begin(self, context: Many[int], specials: Mapping[int, str]) -> None:
        for token in reversed(context):
            if token not in specials:
                self._ids.insert(0, token)
            if len(self._ids) == CONTEXT_TOKENS:
                break
        ends = range(len(self._ids), max(0, len(self._ids) - MAX_PENDING), -1)
        texts = {end: self._decode(self._ids[:end]) for end in ends}
        whole = [end for end, text in texts.items() if not text.endswith(BROKEN)]
        self._known = whole[0] if whole else len(self._ids)
        self._text = texts.get(self._known, "")
        self._num_shown = len(texts.get(len(self._ids), "")) - len(self._text)

    def begin_inside(self) -> None:
        """No effect: without an earlier token, the decoder removes a leading space."""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(BROKEN) and len(self._ids) - self._known < MAX_PENDING:
            return ""
        return self._advance(text)

    def extend(self, tokens: Many[int]) -> str:
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        is_whole = self._known == len(self._ids)
        return "" if is_whole else self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        piece, start = text[len(self._text) :], self._ids[self._known :]
        while self._num_shown and piece.startswith(BROKEN):
            piece, self._num_shown = piece[1:], self._num_shown - 1
        self._num_shown = 0
        tail = self._decode(start) if self._known else text
        if tail or len(self._ids) > MAX_WINDOW:  # else the window keeps earlier ids
            self._ids, text = start, tail
        self._known, self._text = len(self._ids), text
        return piece
