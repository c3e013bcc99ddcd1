"""A lower bound on the number of tokens of a text, without tokenising it."""

from __future__ import annotations

import json
from typing import Any

from forerun.models.token_bytes import byte_alphabet
from forerun.models.tokenizer import Tokenizer


class TokenBounds:
    """Lower bounds on the number of tokens of texts.

    Byte-level BPE keeps all bytes, so a text has at least bytes / (longest token) tokens. Other
    tokenizers may drop or join text: their bound is 0. NFC keeps at least a third of the bytes
    (three Hangul letters of 3 bytes become one syllable of 3 bytes).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.max_bytes = max_bytes_per_token(tokenizer)

    def min_tokens(self, text: str) -> int:
        """A lower bound on the tokens of `text`."""
        if not self.max_bytes:
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // self.max_bytes)


def max_bytes_per_token(tokenizer: Tokenizer) -> int:
    """Max bytes of text per token; 0 if unknown."""
    backend = getattr(getattr(tokenizer, "inner", None), "backend_tokenizer", None)
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
    """The settings of a part of a `tokenizers` tokenizer."""
    return json.loads(part.__getstate__()) if part is not None else {}
