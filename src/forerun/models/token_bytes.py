"""Bytes of single tokens, and the rule that joins them to a text.

Most decoders of the `tokenizers` library give every token a fixed byte string, except the first of
a text. The text is then the UTF-8 decoding of the joined bytes: it can be streamed, and the text of
a list of tokens does not depend on where the list was split.

Bytes that are no character become U+FFFD. Byte-level tokenizers use one for each maximal invalid
part (WHATWG). Tokenizers with byte fallback use one for each byte, as SentencePiece does; valid
characters of the same run of byte tokens stay.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

EACH_BYTE = "forerun.each_byte"  # codec error handler: U+FFFD for each invalid byte
Transform = Callable[[str, bool], str]  # token string, whether it is the first of the text


@dataclass(frozen=True)
class ByteRule:
    """How token strings become bytes, and bytes become text.

    errors: codec error handler. strip: a character, and how many of it the start of a text loses.
    """

    piece: Callable[[str, bool], bytes]  # token string, whether it is the first of the text
    errors: str
    strip: tuple[str, int] = ("", 0)

    @classmethod
    def of(cls, decoder: Any) -> ByteRule | None:
        """The rule of a decoder of `tokenizers`; None if tokens have no fixed bytes."""
        if decoder is None:  # tokens are joined by spaces
            return cls(lambda token, is_first: _utf8(token if is_first else f" {token}"), "replace")
        try:
            state = json.loads(decoder.__getstate__())
        except (AttributeError, TypeError, ValueError):
            return None
        steps = list(_flat(state))
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(lambda token, is_first: _of_alphabet(token), "replace")
        return _of_steps(steps)


def _flat(state: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The steps of a decoder; sequences may be nested."""
    if state.get("type") != "Sequence":
        return [state]
    return [step for part in state["decoders"] for step in _flat(part)]


def _of_steps(steps: list[dict[str, Any]]) -> ByteRule | None:
    """The rule of SentencePiece-style steps: transforms, byte fallback, fuse, strip."""
    before: list[Transform] = []
    has_bytes, is_fused, strip = False, False, ("", 0)
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            is_fused = True
        elif kind == "ByteFallback" and not (has_bytes or is_fused):
            has_bytes = True
        elif kind == "Strip" and is_fused and not step["stop"] and not strip[1]:
            strip = step["content"], step["start"]
        elif not (has_bytes or is_fused) and (made := _transform(step)):
            before.append(made)
        else:
            return None

    def piece(token: str, is_first: bool) -> bytes:
        for change in before:
            token = change(token, is_first)
        byte = _fallback(token) if has_bytes else None
        return _utf8(token) if byte is None else byte

    return ByteRule(piece, EACH_BYTE, strip)


def _transform(step: dict[str, Any]) -> Transform | None:
    """The effect of one step on a single token; None if it is not supported."""
    kind = step["type"]
    if kind == "Replace" and "String" in step["pattern"]:
        old, new = step["pattern"]["String"], step["content"]
        return lambda token, is_first: token.replace(old, new)
    if kind == "Strip" and not step["stop"]:
        content, start = step["content"], step["start"]
        return lambda token, is_first: _stripped(token, content, start)
    if kind == "Metaspace":
        mark, drops = step["replacement"], step.get("prepend_scheme", "always") != "never"
        return lambda token, is_first: token.replace(mark, "" if is_first and drops else " ")
    return None


def _stripped(text: str, content: str, count: int) -> str:
    """The text without up to `count` leading characters `content`."""
    while count and content and text.startswith(content):
        text, count = text[len(content) :], count - 1
    return text


def _fallback(token: str) -> bytes | None:
    """The byte of a token <0xNN>; None for another token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return None


def _of_alphabet(token: str) -> bytes:
    """The bytes of a byte-level token; a token with other characters stands for itself."""
    alphabet = byte_alphabet()
    try:
        return bytes(alphabet[char] for char in token)
    except KeyError:
        return _utf8(token)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level tokenizers: printable Latin-1 is kept, others follow 255.

    Radford et al. 2019.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    codes = {chr(byte): byte for byte in plain}
    return codes | {chr(256 + i): byte for i, byte in enumerate(others)}


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _each_byte)


class ByteText:
    """Joins token bytes to text; at most three bytes of an incomplete character wait."""

    def __init__(self, rule: ByteRule) -> None:
        self._rule = rule
        make = codecs.getincrementaldecoder("utf-8")
        self._decoder = make(rule.errors)
        self.is_first = True  # no token so far; set by the caller
        self._left = rule.strip[1]  # leading characters that may still be removed
        self._num_shown = 0  # U+FFFD that the text before shows for the bytes that wait

    def push(self, piece: bytes) -> str:
        """The text completed by the bytes of a token."""
        return self._strip(self._decoder.decode(piece))

    def flush(self) -> str:
        """The rest, with U+FFFD for an incomplete character."""
        return self._strip(self._decoder.decode(b"", final=True))

    def skip_start(self) -> None:
        """Marks that text stands before: nothing is removed any more."""
        self.is_first, self._left = False, 0

    def skip_broken(self) -> None:
        """Marks that the text before shows U+FFFD for the bytes that wait.

        If they never become a character, they are not shown again.
        """
        waiting, _ = self._decoder.getstate()
        self._num_shown = len(waiting.decode("utf-8", self._rule.errors))

    def _strip(self, text: str) -> str:
        if self._num_shown and text:
            text, self._num_shown = _stripped(text, "\ufffd", self._num_shown), 0
        if not self._left or not text:
            return text
        rest = _stripped(text, self._rule.strip[0], self._left)
        self._left = self._left - (len(text) - len(rest)) if not rest else 0
        return rest
