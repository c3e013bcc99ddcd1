"""Tokens as clients see them in log-probabilities: text, and the bytes behind it.

A token may hold part of a character; the bytes of all tokens of a text, joined, are the text's.
"""

from __future__ import annotations

from forerun.models.token_bounds import byte_alphabet
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
