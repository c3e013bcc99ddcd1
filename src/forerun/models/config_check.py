"""Checks that the sizes in a decoder's config fit together. Does not import torch."""

from __future__ import annotations

import math
from typing import Any

MAX_LAYERS = MAX_EXPERTS = 4096
ABSENT: dict[str, tuple[str, ...]] = {  # model type -> fields that it never has
    "gemma2": ("mlp_bias",),
    "gemma3_text": ("mlp_bias",),
    "granite": ("head_dim",),
    "mistral": ("attention_bias", "mlp_bias"),
    "olmo2": ("head_dim", "mlp_bias"),
    "phi3": ("head_dim", "attention_bias", "mlp_bias"),
    "qwen2": ("head_dim", "attention_bias", "mlp_bias"),
    "qwen3": ("mlp_bias",),
    "smollm3": ("head_dim",),
}


def check_decoder(c: Any) -> None:
    """Raises ValueError for a `DecoderConfig` with sizes that are wrong or inconsistent."""
    counts = "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim mlp_size context"
    for name in counts.split():
        value, least = getattr(c, name), 0 if c.moe and name == "mlp_size" else 1
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if type(c.head_size) is not int or not 0 <= c.head_size <= c.vocab_size:
        raise ValueError(
            f"draft_vocab_size must be from 1 to vocab_size, {c.vocab_size}, got {c.head_size!r}"
        )
    if c.head_size and c.is_tied:
        raise ValueError("draft_vocab_size needs tie_word_embeddings to be false")
    if c.num_layers > MAX_LAYERS:
        raise ValueError(f"num_layers must be at most {MAX_LAYERS:,}, got {c.num_layers}")
    needed = [c.norm_eps, c.attn_scale, c.residual_scale, c.logit_divisor]
    needed += [number for r in c.ropes for number in (r.scale, *r.inv_freq)]
    optional = [c.attn_softcap, c.logit_softcap, c.embed_scale]
    for value in (*needed, *(value for value in optional if value is not None)):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"a norm, rotation or scale would be computed with {value!r}")
    for heads, kv_heads in {(c.heads(i), c.kv_heads(i)) for i in range(c.num_layers)}:
        if heads % kv_heads:
            raise ValueError(f"{heads} heads do not share {kv_heads} key-value heads")
    if any(2 * len(r.inv_freq) > c.head_dim for r in c.ropes):
        raise ValueError(f"heads have {c.head_dim} dimensions, an odd number or fewer than turn")
    for window in set(c.windows) - {None}:
        if type(window) is not int or window < 1:
            raise ValueError(f"sliding_window must be an integer of at least 1, got {window!r}")
    if len(c.windows) not in (0, c.num_layers):
        raise ValueError(f"layer_types are {len(c.windows)}, and num_hidden_layers {c.num_layers}")
    if len(c.layer_ropes) not in (0, c.num_layers):
        raise ValueError(
            f"no_rope_layers are {len(c.layer_ropes)}, and num_hidden_layers {c.num_layers}"
        )
    if c.moe and c.moe.num_experts > MAX_EXPERTS:
        raise ValueError(f"expected at most {MAX_EXPERTS:,} experts, got {c.moe.num_experts}")
    if c.moe and any(c.moe.layers) and not 1 <= c.moe.top_k <= c.moe.num_experts:
        raise ValueError(f"{c.moe.top_k} of {c.moe.num_experts} experts cannot be chosen per token")
