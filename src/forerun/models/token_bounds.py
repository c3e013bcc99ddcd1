"""How many tokens a text has at least, without tokenising it: that takes long where it is long."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from forerun.models.tokenizer import Tokenizer


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
