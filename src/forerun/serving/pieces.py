"""Tokens as clients see them in log-probabilities: text, and the bytes behind it.

A token may hold part of a character; the bytes of all tokens of a text, joined, are the text's.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from forerun.models.tokenizer import Tokenizer


class Pieces:
    """Text and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inner = tokenizer.inner
        self._decode = tokenizer.decode
        self._special = set(getattr(self._inner, "all_special_ids", ()))
        decoder = getattr(getattr(self._inner, "backend_tokenizer", None), "decoder", None)
        self._alphabet = byte_alphabet() if "ByteLevel" in repr(decoder) else None

    def text(self, token: int) -> str:
        """The token's text; "bytes:" and escapes where it is no whole characters."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes(self, token: int) -> bytes:
        """The token's bytes; a special token is its name."""
        piece = self._inner.convert_ids_to_tokens(token)
        if not isinstance(piece, str):  # ids without a token: the model's rows are padded
            return b""
        if token in self._special:
            return piece.encode()
        if self._alphabet and all(char in self._alphabet for char in piece):
            return bytes(self._alphabet[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode("utf-8", "replace")


class Sizes:
    """A lower bound on the number of a text's tokens, without tokenising it.

    Tokens of a byte-level BPE hold all bytes of a text: there are at least bytes / longest token.
    Other tokenizers may drop or join text: their bound is 0. NFC leaves a third of the bytes or
    more (three Hangul letters of 3 bytes are one syllable of 3).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.most = most_bytes(tokenizer)

    def least(self, text: str) -> int:
        """So many tokens, or more."""
        return -(-len(text.encode("utf-8", "surrogatepass")) // self.most) if self.most else 0


def most_bytes(tokenizer: Tokenizer) -> int:
    """Bytes of a text that one token may stand for; 0 where there is no telling."""
    backend = getattr(tokenizer.inner, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return 0
    shrinks = {None: 1, "NFC": 3}.get(_state(backend.normalizer).get("type"), 0)
    before, vocabulary = _state(backend.pre_tokenizer), tokenizer.vocabulary()
    steps = before.get("pretokenizers", [before])
    kinds = {step.get("type") for step in steps}
    keeps_all = (
        "ByteLevel" in kinds
        and kinds <= {"ByteLevel", "Split", "Digits"}
        and not any(step.get("behavior") == "Removed" for step in steps)
        and byte_alphabet().keys() <= vocabulary.keys()
    )
    added = backend.get_added_tokens_decoder().values()
    if not keeps_all or any(token.lstrip or token.rstrip for token in added):
        return 0
    return shrinks * max(len(token.encode()) for token in vocabulary)


def _state(part: Any) -> dict[str, Any]:
    """The settings of a part of a tokenizer of `tokenizers`."""
    return json.loads(part.__getstate__()) if part is not None else {}


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level tokenizers: printable Latin-1 is itself, others follow 255.

    Radford et al. 2019.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    codes = {chr(byte): byte for byte in plain}
    return codes | {chr(256 + i): byte for i, byte in enumerate(others)}
