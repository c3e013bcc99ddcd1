"""Small random models of transformers, and their texts by plain generate and by ours."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    Phi3Config,
    Qwen2Config,
)

from forerun.integrations.hf import generate

VOCAB = 48
IS_RENAMED = "cache" in inspect.signature(LlamaForCausalLM.forward).parameters  # from 5.24 on
CACHE = "cache" if IS_RENAMED else "past_key_values"
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPT = torch.tensor([[5, 6, 7, 5, 6, 9, 5, 6, 7]])
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}


def made(kind: str, **fields: Any) -> Any:
    """A small random model whose texts vary."""
    plain = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    configs: dict[str, Any] = {
        "llama": lambda: LlamaConfig(**SIZES, **{"max_position_embeddings": 256, **fields}),
        "qwen2": lambda: Qwen2Config(**SIZES, **{"max_position_embeddings": 256, **fields}),
        "gemma2": lambda: Gemma2Config(
            **SIZES,
            **{"max_position_embeddings": 256, "head_dim": 16, "sliding_window": 12, **fields},
        ),
        "phi3": lambda: Phi3Config(**SIZES, **{"max_position_embeddings": 256, **fields}),
        "gpt2": lambda: GPT2Config(
            **plain, **{"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **fields}
        ),
        "bloom": lambda: BloomConfig(**plain, hidden_size=32, n_layer=2, n_head=2, **fields),
        "mpt": lambda: MptConfig(
            **plain, **{"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64, **fields}
        ),
    }
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(configs[kind]())
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.dim() > 1 else 1
    model.generation_config.eos_token_id = fields.get("eos")
    model.generation_config.pad_token_id = 0
    return model.eval()


def both(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> tuple[Any, Any]:
    """The output of plain generate, and ours with drafts."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    plain = {name: value for name, value in options.items() if name != "rowwise"}
    return model.generate(ids, **plain), ours(model, ids, **options)


def ours(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> Any:
    options = {"max_new_tokens": 24, "do_sample": False, "drafter": "stand", **options}
    return model.generate(ids, controller="fixed", **options, custom_generate=generate)


def same(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> bool:
    want, got = both(model, ids, **options)
    return torch.equal(want, got)


def rope(kind: str, factor: float = 4.0, own: int = 32) -> dict[str, Any]:
    params: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": factor}
    if kind == "yarn":
        params["original_max_position_embeddings"] = own
    if kind == "longrope":
        params |= {**FACTORS, "original_max_position_embeddings": own}
        own *= 8
    return {"max_position_embeddings": own, "rope_parameters": params}
