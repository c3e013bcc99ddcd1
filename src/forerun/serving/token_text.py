"""Text and bytes of single tokens, for log-probabilities.

A token may hold part of a character. The concatenated bytes of all tokens are those of the text.
"""

from __future__ import annotations

from forerun.models.tokenizer import Tokenizer


class TokenText:
    """Text and bytes of single tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._inner = tokenizer, tokenizer.inner
        self._pieces, self._specials = tokenizer.pieces, tokenizer.specials

    def text(self, token: int) -> str:
        """The token's text; "bytes:" and escapes if it is not valid UTF-8 alone."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes(self, token: int) -> bytes:
        """The token's bytes within a text; for a special token its name."""
        if token in self._specials:
            return self._specials[token].encode()
        if self._pieces is not None:
            return self._pieces(token) or b""  # an id of the padding of the vocabulary has none
        piece = self._inner.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return b""
        return piece.replace("\u2581", " ").encode("utf-8", "replace")
