"""Tokenizers of a few given tokens: a, b and the end token for the fake targets, or others."""

from __future__ import annotations

from collections.abc import Sequence as Many

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from forerun.models.tokenizer import Tokenizer

TOKENS, END = ("a", "b", "<end>"), 2


def three_tokens() -> Tokenizer:
    return word_tokens(TOKENS)


def word_tokens(tokens: Many[str]) -> Tokenizer:
    """A tokenizer of these tokens, with their indices as ids; "<end>" ends a text."""
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.WordLevel(vocab, unk_token=tokens[0]))
    backend.decoder = decoders.ByteLevel()
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    return Tokenizer(inner, [vocab["<end>"]])
