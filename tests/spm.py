"""A Llama-2 style tokenizer, and a model that says given tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from fakes import FakeTarget
from forerun.api import Model
from forerun.models.tokenizer import Tokenizer

WORDS = ("▁there", "▁was", "▁a", "▁little", "▁", "▁▁", "a", "girl", ".", "é", "<", ">", "s")


def spm(**more: str) -> Tokenizer:
    """<unk> <s> </s>, 256 byte tokens, then WORDS; the decoder strips a leading space."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS]
    rust = Rust(models.BPE({n: i for i, n in enumerate(names)}, [], byte_fallback=True))
    prepend = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    rust.normalizer = normalizers.Sequence(prepend)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | more
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, **special))


def ids(tokenizer: Tokenizer, *names: str | int) -> list[int]:
    """Ids of token strings; a number is a byte."""
    known = tokenizer.vocabulary()
    return [known[f"<0x{n:02X}>" if isinstance(n, int) else n] for n in names]


def says(tokenizer: Tokenizer, tokens: Many[int], num_prompt: int) -> Model:
    """A model that continues any prompt of `num_prompt` tokens with these tokens."""
    size = tokenizer.vocab_size

    def law(path: Many[int]) -> np.ndarray:
        row = np.full(size, 1e-12)
        row[tokens[(len(path) - num_prompt) % len(tokens)]] = 1.0
        return row / row.sum()

    return Model(FakeTarget(law, size), tokenizer, "script")


def saved(folder: Path, tokenizer: Tokenizer) -> Path:
    """The folder with this tokenizer."""
    tokenizer.inner.save_pretrained(folder)
    return folder
