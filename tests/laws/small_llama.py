"""A random llama over the vocabulary of the laws, small enough for enumeration."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fakes import VOCAB

DEPTHS = (1, 2, 3)  # of its sub-models


def save_llama(folder: Path) -> Path:
    """Writes a llama with one layer per depth into `folder`; every depth has its own law."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": max(DEPTHS)}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6.0)  # else all depths say the same
    model.save_pretrained(folder)
    return folder
