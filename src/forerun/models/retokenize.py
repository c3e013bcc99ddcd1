"""Writes the text of one tokenizer's tokens in the tokens of another.

Text is encoded, special tokens map by role, and bytes that are no character yet become the other
tokenizer's byte tokens. `TextView` follows a growing text: it encodes again only from the last cut,
a place where both tokenizers start a new word, so earlier tokens stay and a KV cache is reused.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from forerun.models.vocab_map import NONE, Vocab, VocabMap


class Retokenizer:
    """Tokens of `source` as tokens of `goal`, within a text.

    encode: ids of a text in the goal's vocabulary, without special tokens.
    """

    def __init__(
        self, source: Vocab, goal: Vocab, to_goal: VocabMap, encode: Callable[[str], list[int]]
    ) -> None:
        self.source, self._map, self._encode = source, to_goal, encode
        pieces = goal.by_bytes()
        self._bytes = [pieces.get(bytes([byte]), NONE) for byte in range(256)]

    def __call__(self, tokens: Many[int]) -> list[int]:
        """Goal ids of source tokens; a special token without a counterpart is left out."""
        found, run = list[int](), b""
        for token in tokens:
            piece = self.piece(token)
            if piece is not None:
                run += piece
                continue
            found += self.encode(run)
            run, goal = b"", self._map.to(token)
            if goal != NONE:
                found.append(goal)
        return found + self.encode(run)

    def piece(self, token: int) -> bytes | None:
        """The bytes of a source token; None for special tokens and padding."""
        return self.source.pieces[token] if 0 <= token < self.source.size else None

    def encode(self, data: bytes) -> list[int]:
        """Goal ids of bytes."""
        found = list[int]()
        while data:
            text, broken, data = _split(data)
            found += self._encode(text) if text else []
            found += [self._bytes[byte] for byte in broken if self._bytes[byte] != NONE]
        return found


def _split(data: bytes) -> tuple[str, bytes, bytes]:
    """The leading text of UTF-8 data, the bytes after it that are no character, and the rest."""
    try:
        return data.decode(), b"", b""
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), data[error.start : error.end], data[error.end :]


class TextView:
    """A growing text of source tokens as goal tokens, `ids`.

    start: the source's tokens before a text (bos), and the goal's in their place.
    """

    def __init__(self, write: Retokenizer, start: tuple[Many[int], Many[int]] = ((), ())) -> None:
        self._write, self._start = write, (list(start[0]), list(start[1]))
        self.tokens: list[int] = []
        self.ids: list[int] = []
        self._cuts: list[tuple[int, int]] = []  # rising: number of tokens, number of ids

    def follow(self, tokens: list[int]) -> list[int]:
        """The ids of these tokens; a new list whenever they change."""
        kept = _common_prefix(self.tokens, tokens)
        if kept == len(self.tokens) == len(tokens) and self._cuts:
            return self.ids
        while self._cuts and self._cuts[-1][0] >= kept:
            self._cuts.pop()
        if not self._cuts:
            before, instead = self._start
            has_start = tokens[: len(before)] == before
            self._cuts = [(len(before) if has_start else 0, len(instead))]
            self.ids = list(instead)
        at, have = self._cuts[-1]
        ids, cut = self.ids[:have], self._last_cut(tokens, at)
        if cut > at:
            ids += self._write(tokens[at:cut])
            self._cuts.append((cut, len(ids)))
        self.ids, self.tokens = ids + self._write(tokens[cut:]), list(tokens)
        return self.ids

    def tail(self) -> list[int]:
        """The tokens after the last cut."""
        return self.tokens[self._cuts[-1][0] :] if self._cuts else []

    def _last_cut(self, tokens: list[int], at: int) -> int:
        """The last cut after `at`; `at` itself if there is none."""
        for place in range(len(tokens) - 1, at, -1):
            if is_cut(self._write.piece(tokens[place - 1]), self._write.piece(tokens[place])):
                return place
        return at


def is_cut(before: bytes | None, piece: bytes | None) -> bool:
    """Whether tokenizers start a word between two tokens: at a special token, or before " x"."""
    if before is None or piece is None:
        return True
    is_word = piece[:1] == b" " and piece[1:2].isalpha()
    return is_word and not before[-1:].isspace()


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    if a == b[: len(a)]:
        return len(a)
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
