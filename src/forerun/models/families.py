"""The transformers model families that our decoder runs, and the mapping of their configs.

A family is implemented exactly as in transformers. Anything else raises Unsupported, and the loader
then uses transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.models.config_check import check_decoder
from forerun.models.hf_rope import depends_on_length, stretched
from forerun.models.layers import GELU_TANH
from forerun.models.transformer import DecoderConfig, Moe, RopeConfig
from forerun.models.weight_map import Piece, gpt2_pieces, llama_pieces, shapes


class Unsupported(Exception):
    """Our decoder does not support this model; the message gives the reason."""


ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "relu": "relu",
}
HEAD_SIZE = "draft_vocab_size"  # config field of a reduced head, as vLLM names it
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Plan:
    """How to load a model into our decoder: config, shapes of parts, places of tensors."""

    config: DecoderConfig
    shapes: dict[str, tuple[int, ...]]
    pieces: dict[str, Piece]  # checkpoint name without its prefix -> place


def plan_for(config: Any, context: int | None = None) -> Plan:
    """The plan for a transformers config. Raises Unsupported with the reason.

    An invalid config raises ValueError, or any error of a field with a wrong type.
    context: max sequence length; None is the model's own.
    """
    name = getattr(config, "model_type", None)
    if name not in FAMILIES:
        raise Unsupported(f"model type {name!r} is not one of {', '.join(sorted(FAMILIES))}")
    if getattr(config, "quantization_config", None) is not None:
        raise Unsupported("the checkpoint is quantised")
    c = FAMILIES[name](config, context)
    if (head_size := vars(config).get(HEAD_SIZE)) is not None:
        c = replace(c, head_size=head_size)
    check_decoder(c)
    pieces = dict(gpt2_pieces(c) if name == "gpt2" else llama_pieces(c, name))
    return Plan(c, shapes(c), pieces)


def llama(config: Any, context: int | None, act: str = "hidden_act") -> DecoderConfig:
    """The config of llama, which other families modify. act: name of the activation field."""
    head_dim = head_size(config)
    ropes, layer_ropes, limit = rotations(config, context)
    heads, layer_heads = by_layer(config, "num_attention_heads")
    kv_heads, layer_kv_heads = by_layer(config, "num_key_value_heads")
    mlp_size, layer_mlp_sizes = by_layer(config, "intermediate_size")
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=mlp_size,
        layer_heads=layer_heads,
        layer_kv_heads=layer_kv_heads,
        layer_mlp_sizes=layer_mlp_sizes,
        context=limit,
        attn_scale=head_dim**-0.5,
        norm_eps=config.rms_norm_eps,
        act=activation(getattr(config, act)),
        ropes=ropes,
        layer_ropes=layer_ropes,
        qkv_bias=bool(getattr(config, "attention_bias", False)),
        out_bias=bool(getattr(config, "attention_bias", False)),
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        is_tied=bool(config.tie_word_embeddings),
    )


def mistral(config: Any, context: int | None) -> DecoderConfig:
    """llama with one window for all layers; no biases. Also phi3."""
    windows = (getattr(config, "sliding_window", None),) * config.num_hidden_layers
    c = replace(llama(config, context), windows=() if windows[0] is None else windows)
    return replace(c, qkv_bias=False, out_bias=False, mlp_bias=False)


def qwen2(config: Any, context: int | None) -> DecoderConfig:
    """llama with biases on queries, keys and values, and windows by layer type."""
    c = replace(llama(config, context), windows=typed_windows(config))
    return replace(c, qkv_bias=True, out_bias=False, mlp_bias=False)


def qwen3(config: Any, context: int | None) -> DecoderConfig:
    """llama with a norm on every query and key head, and windows by layer type."""
    c = llama(config, context)
    return replace(c, windows=typed_windows(config), qk_norm="head", mlp_bias=False)


def qwen3_moe(config: Any, context: int | None) -> DecoderConfig:
    """qwen3 with experts in place of the gated MLP in some layers."""
    step, plain = config.decoder_sparse_step, config.mlp_only_layers
    sparse = tuple(
        i not in plain and config.num_experts > 0 and (i + 1) % step == 0
        for i in range(config.num_hidden_layers)
    )
    moe = Moe(
        layers=sparse,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        normalise=bool(config.norm_topk_prob),
    )
    windows = (getattr(config, "sliding_window", None),) * config.num_hidden_layers
    c = replace(llama(config, context), windows=() if windows[0] is None else windows)
    return replace(c, qk_norm="head", moe=moe, mlp_bias=False)


def gemma2(config: Any, context: int | None) -> DecoderConfig:
    """(1 + w) norms before and after, alternating windows, soft caps, scaled embeddings."""
    if getattr(config, "use_bidirectional_attention", None):
        raise Unsupported("bidirectional attention")
    return replace(
        llama(config, context, act="hidden_activation"),
        attn_scale=config.query_pre_attn_scalar**-0.5,
        norm_offset=1.0,
        norms="both",
        windows=typed_windows(config),
        attn_softcap=config.attn_logit_softcapping,
        logit_softcap=config.final_logit_softcapping,
        embed_scale=config.hidden_size**0.5,
        rounds_embed_scale=True,
        mlp_bias=False,
    )


def gemma3(config: Any, context: int | None) -> DecoderConfig:
    """gemma2 with a norm on every query and key head, two rotary bases, no caps on attention."""
    c = gemma2(config, context)  # transformers ignores attn_logit_softcapping here
    return replace(c, qk_norm="head", attn_softcap=None)


def smollm3(config: Any, context: int | None) -> DecoderConfig:
    """llama without rotation in some layers, and windows by layer type."""
    c = replace(llama(config, context), windows=typed_windows(config))
    rotates = config.no_rope_layers[: c.num_layers]  # 1: the layer rotates
    return replace(c, layer_ropes=tuple(0 if flag else None for flag in rotates))


def granite(config: Any, context: int | None) -> DecoderConfig:
    """llama with multipliers of embeddings, attention scores, residual parts and logits."""
    return replace(
        llama(config, context),
        attn_scale=config.attention_multiplier,
        embed_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_divisor=config.logits_scaling,
    )


def olmo2(config: Any, context: int | None) -> DecoderConfig:
    """llama with norms after attention and MLP, and QK-norm over the whole width."""
    return replace(llama(config, context), norms="post", qk_norm="width", mlp_bias=False)


def gpt2(config: Any, context: int | None) -> DecoderConfig:
    """LayerNorm, learned positions, a plain MLP, biases everywhere."""
    for flag in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if getattr(config, flag, False):
            raise Unsupported(flag)
    head_dim = config.n_embd // config.n_head
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        num_layers=config.n_layer,
        num_heads=config.n_head,
        num_kv_heads=config.n_head,
        head_dim=head_dim,
        mlp_size=config.n_inner or 4 * config.n_embd,
        context=config.n_positions,
        attn_scale=head_dim**-0.5 if config.scale_attn_weights else 1.0,
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        act=activation(config.activation_function),
        is_gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        is_tied=bool(config.tie_word_embeddings),
    )


FAMILIES: dict[str, Callable[[Any, int | None], DecoderConfig]] = {
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "granite": granite,
    "llama": llama,
    "mistral": mistral,
    "olmo2": olmo2,
    "phi3": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "smollm3": smollm3,
}


def activation(name: str) -> str:
    """Our name of a transformers activation."""
    if name not in ACTIVATION_NAMES:
        raise Unsupported(f"activation {name!r}")
    return ACTIVATION_NAMES[name]


def by_layer(config: Any, name: str) -> tuple[int, tuple[int, ...]]:
    """The largest size of a field, and its sizes per layer; () if all are equal."""
    lists = vars(config).get("per_layer", {})  # set by `paths.read_config`
    value = lists.get(name) or getattr(config, name)
    if not isinstance(value, list | tuple):
        return value, ()
    if len(value) != config.num_hidden_layers:
        raise ValueError(
            f"{name} lists {len(value)} sizes for {config.num_hidden_layers} layers; it needs one "
            "per layer"
        )
    if not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"{name} must list integers of at least 1, got {value!r}")
    return max(value), () if len(set(value)) == 1 else tuple(value)


def typed_windows(config: Any) -> tuple[int | None, ...]:
    """Window per layer from `layer_types`; empty if no layer has one."""
    types = config.layer_types
    strange = set(types) - {"full_attention", "sliding_attention"}
    if strange:
        raise Unsupported(f"layer type {strange.pop()!r}")
    windows = [config.sliding_window if t == "sliding_attention" else None for t in types]
    return tuple(windows) if any(windows) else ()


Rotations = tuple[tuple[RopeConfig, ...], tuple[int | None, ...], int]


def rotations(config: Any, context: int | None) -> Rotations:
    """Rotary tables, the table index of every layer, and the max context of the tables.

    `rope_parameters` is one dict, or one per layer type.
    """
    params = config.rope_parameters or {}
    if not any(isinstance(value, dict) for value in params.values()):
        table, limit = rope(config, params, context)
        return (table,), (), limit
    kinds = sorted(set(config.layer_types))
    found = [rope(config, params[kind] or {}, context, kind) for kind in kinds]
    tables = tuple(table for table, _ in found)
    return tables, tuple(map(kinds.index, config.layer_types)), min(limit for _, limit in found)


def rope(
    config: Any, params: dict[str, Any], context: int | None, layer_type: str | None = None
) -> tuple[RopeConfig, int]:
    """The rotary table of these parameters, and its max context."""
    kind = params.get("rope_type", "default") if params else None
    limit = stretched(config.max_position_embeddings, params)
    if kind not in ROPE_TYPES:
        raise Unsupported(f"rope type {kind!r}")
    share = params.get("partial_rotary_factor", 1.0)
    if not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor must be above 0 and at most 1, got {share!r}")
    if config.model_type != "phi3" and share != 1:
        raise Unsupported("partial rotary embeddings")
    if kind in ("default", "linear"):
        dim = int(head_size(config) * share)
        power = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        inv_freq = 1.0 / params["rope_theta"] ** power
        inv_freq /= params["factor"] if kind == "linear" else 1.0
        return RopeConfig(tuple(inv_freq.tolist())), limit
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wanted = None
    if kind == "longrope":  # one table here; transformers takes another one for longer texts
        switch = params["original_max_position_embeddings"]
        is_longer = limit > switch and (context is None or context > switch)
        if is_longer and depends_on_length(params):
            raise Unsupported(
                f"longrope changes its table after {switch} tokens; context={switch} or less runs "
                "on forerun's decoder"
            )
        wanted = min(limit, switch)
        limit = min(limit, switch) if depends_on_length(params) else limit
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](
        config, torch.device("cpu"), seq_len=wanted, layer_type=layer_type
    )
    return RopeConfig(tuple(inv_freq.tolist()), float(scale)), limit


def head_size(config: Any) -> int:
    """The number of dimensions of a head. Raises ValueError for 0."""
    size = getattr(config, "head_dim", None)
    if size == 0:
        raise ValueError("head_dim must be an integer of at least 1, got 0")
    return config.hidden_size // config.num_attention_heads if size is None else size
