"""A random llama checkpoint with a small BPE tokenizer, real files made in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT = (
    "the cat sat on the mat and the dog sat on the log while the rain fell on the plain ",
    "one two three four five six seven eight nine ten and then ten nine eight seven six ",
)


def make_tiny(folder: Path, *, seed: int = 0, context: int = 128, vocab: int = 288) -> Path:
    """Writes a two-layer llama whose laws have a few likely tokens, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer(folder, vocab)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # else all laws are nearly uniform
        model.lm_head.weight.normal_(0.0, 0.45)
        model.model.embed_tokens.weight.normal_(0.0, 0.5)
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.normal_(0.0, 0.3)
            layer.self_attn.o_proj.weight.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def tokenizer_pair(folder: Path) -> tuple[Any, Any]:
    """Two byte-level tokenizers of the same text, 262 and 320 tokens: the second merges more."""
    from forerun.models.tokenizer import Tokenizer

    for name, vocab in (("small", 262), ("large", 320)):
        make_tokenizer(folder / name, vocab)
    return Tokenizer.load(folder / "small"), Tokenizer.load(folder / "large")


def make_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level BPE of exactly `vocab` tokens; id 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXT, trainer)
    assert inner.get_vocab_size() == vocab
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(folder)
