"""Tiny random checkpoints of every family, and the comparison of our rows with transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Rows, Sequence
from forerun.core.roles import Target
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, TreeBuilder

VOCAB = 100
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3 = {  # few layers of both kinds, and windows that short texts exceed
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased-tied": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "head_dim": 16,
    },
    "llama-llama3": {"rope_parameters": LLAMA3},
    "llama-linear": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    },
    "mistral": {"sliding_window": 8, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "rope_parameters": YARN},
    "qwen3-biased": {"head_dim": 16, "attention_bias": True},
    "phi3": {"sliding_window": 10},
    "phi3-partial": {
        "hidden_size": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
    },
    "phi3-longrope": {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
    },
    "gemma3_text": GEMMA3,
    "gemma3_text-linear": {
        **GEMMA3,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        "attn_logit_softcapping": 2.0,  # without effect in this family
        "final_logit_softcapping": 1.5,
        "attention_bias": True,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "attention_bias": True, "mlp_bias": True},
    "smollm3-windows": {
        "no_rope_layers": [0, 1, 0, 0],  # more than layers
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 7.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "granite-tied": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
        "logits_scaling": 8,
    },
    "olmo2": {},
    "gpt2": {},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3_moe-sparse": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
        "sliding_window": 8,
        "use_sliding_window": True,
    },
}


def tiny(case: str, seed: int = 0, **options: Any) -> Any:
    """A random model of a case, every parameter made visible (no zero biases, no unit norms)."""
    family = case.partition("-")[0]
    fields = {**TINY, **CASES.get(case, {}), **options}
    if family == "gpt2":
        fields = {"n_positions": 256, "n_embd": 48, "n_layer": 3, "n_head": 4, **fields}
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers"):
            fields.pop(name)
        for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
            fields.pop(name)
    config = transformers.AutoConfig.for_model(family, **fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def saved(case: str, folder: Path, **options: Any) -> Any:
    """The same, saved as an ordinary checkpoint; returns the model."""
    model = tiny(case, **options)
    model.save_pretrained(folder)
    return model


def sequence(tokens: list[int], limit: int = 100) -> Sequence:
    """A greedy sequence whose prompt is `tokens`."""
    return Sequence(list(tokens), len(tokens), Sampling(temperature=0.0), SeededDice(0), limit)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng([seed, length]).integers(3, VOCAB, length).tolist()


def branching(seed: int = 0) -> Tree:
    """Two branches of depth 3 below the root, with siblings: 8 nodes."""
    tokens = np.random.default_rng(seed).permutation(VOCAB)[:8].tolist()
    builder = TreeBuilder()
    for token, parent in zip(tokens, (-1, -1, 0, 0, 1, 2, 4, 4), strict=True):
        builder.add(token, parent)
    return builder.build()


@torch.inference_mode()
def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [n, V] after every token, in one plain pass."""
    return model(torch.tensor([tokens])).logits[0].float()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference relative to the largest logit."""
    return float((got.float() - want).abs().max() / want.abs().max())


def worst(model: Any, seq: Sequence, tree: Tree, rows: Rows) -> float:
    """Largest relative error of a tree pass against separate plain passes."""
    errors = [error(rows.logits[0], expected(model, seq.tokens)[-1])]
    for node in range(len(tree)):
        want = expected(model, seq.tokens + tree.path(node))[-1]
        errors.append(error(rows.logits[node + 1], want))
    return max(errors)


def forward(target: Target, seqs: list[Sequence], trees: list[Tree]) -> list[Rows]:
    """One pass that asks for nothing special."""
    return target.forward(ForwardBatch(seqs, trees))
