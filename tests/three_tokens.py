"""A tokenizer of three tokens: a, b and the end token, the ids of the fake targets."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from forerun.models.tokenizer import Tokenizer

TOKENS, END = ("a", "b", "<end>"), 2


def three_tokens() -> Tokenizer:
    backend = Backend(models.WordLevel({t: i for i, t in enumerate(TOKENS)}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    return Tokenizer(inner, [END])
