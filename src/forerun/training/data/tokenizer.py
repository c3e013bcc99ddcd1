"""Byte-level BPE tokenizers for small models; each digit is a token."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
PIECES = r" ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]+|\s"  # words, digits, signs; breaks


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A tokenizer trained on texts. A line break is one token, so a prompt may end in it."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
