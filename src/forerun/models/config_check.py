"""What the numbers of a model's config may be, so that a wrong one is named and not met later.

Nothing here needs torch. Both checks raise ValueError with what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

MOST = 1 << 24  # of what a config counts; real ones stay far below
MOST_PARTS = 1 << 12  # that are made one by one, which costs time before a weight is looked at
MOST_TOKENS = 1 << 40  # of a context
NESTED = (
    *("text_config", "rope_parameters", "rope_scaling"),
    *("full_attention", "sliding_attention"),  # of rope_parameters
)
ABSENT: dict[str, tuple[str, ...]] = {  # model type -> fields that we ask for and it never has
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
COUNTS: dict[str, tuple[int, int]] = {  # name in config.json -> least, most
    **dict.fromkeys(("vocab_size", "hidden_size", "n_embd"), (1, MOST)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), (1, MOST)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner"), (0, MOST)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, MOST_TOKENS)),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, MOST_PARTS)),
    "head_dim": (0, MOST_PARTS),  # some families write the part that is turned
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), (0, MOST)),
    "decoder_sparse_step": (1, MOST_PARTS),
}
SIZES = {  # name -> whether it may be 0
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), True),
    **dict.fromkeys(("rope_theta", "factor", "query_pre_attn_scalar"), False),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), False),
    **dict.fromkeys(("attention_multiplier", "logits_scaling"), False),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), True),
}


def check_fields(said: dict[str, Any]) -> None:
    """Looks at the numbers of a config.json of any family; lists and null are for transformers."""
    for name, value in _numbers(said):
        if name in COUNTS:
            least, most = COUNTS[name]
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"{name} must be an integer from {least} to {most:,}, got {value!r}"
                )
        elif name in SIZES:
            can_be_0 = SIZES[name]
            is_finite = type(value) in (int, float) and math.isfinite(value)
            if not is_finite or value < 0 or (value == 0 and not can_be_0):
                border = "of at least" if can_be_0 else "above"
                raise ValueError(f"{name} must be a finite number {border} 0, got {value!r}")


def _numbers(said: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of what is a number, or text where one may be meant."""
    for name, value in said.items():
        if isinstance(value, int | float | str):
            yield name, value
        elif name in NESTED and isinstance(value, dict):
            yield from _numbers(value)


def check_decoder(c: Any) -> None:
    """Looks at a whole `DecoderConfig`: its numbers, and whether its heads and layers fit."""
    counts = "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim mlp_size context"
    for name in counts.split():
        value, least = getattr(c, name), 0 if c.moe and name == "mlp_size" else 1
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
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
    if c.moe and c.moe.num_experts > MOST_PARTS:
        raise ValueError(f"expected at most {MOST_PARTS:,} experts, got {c.moe.num_experts}")
    if c.moe and any(c.moe.layers) and not 1 <= c.moe.top_k <= c.moe.num_experts:
        raise ValueError(f"{c.moe.top_k} of {c.moe.num_experts} experts cannot be chosen per token")
