"""Text and bytes of single tokens, for log-probabilities.

A token may hold part of a character. The concatenated bytes of all tokens are those of the text.
"""

from __future__ import annotations

from forerun.models.token_bounds import byte_alphabet
from forerun.models.tokenizer import Tokenizer


class TokenText:
    """Text and bytes of single tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inner = tokenizer.inner
        self._decode = tokenizer.decode
        self._special = set(getattr(self._inner, "all_special_ids", ()))
        decoder = getattr(getattr(self._inner, "backend_tokenizer", None), "decoder", None)
        self._alphabet = byte_alphabet() if "ByteLevel" in repr(decoder) else None

    def text(self, token: int) -> str:
        """The token's text; "bytes:" and escapes if it is not valid UTF-8 alone."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes(self, token: int) -> bytes:
        """The token's bytes; for a special token its name."""
        piece = self._inner.convert_ids_to_tokens(token)
        if not isinstance(piece, str):  # an id of the padding of the model's vocabulary
            return b""
        if token in self._special:
            return piece.encode()
        if self._alphabet and all(char in self._alphabet for char in piece):
            return bytes(self._alphabet[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode("utf-8", "replace")
