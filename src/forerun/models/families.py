"""Which transformers models our decoder runs, and how their configs and tensor names map to it.

A family is described exactly as transformers runs it, or not at all: whatever is not handled raises
Unsupported, and the loader then uses transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.models.layers import GELU_TANH
from forerun.models.rope import roll_order
from forerun.models.transformer import DecoderConfig, Moe


class Unsupported(Exception):
    """Our decoder does not run this model; the message says why."""


ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "relu": "relu",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
PREFIXES = ("model.", "transformer.")
IGNORED = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")  # buffers, not weights


@dataclass(frozen=True)
class Piece:
    """Where a checkpoint tensor goes: rows from `row` on of part `dest`, after `fix`."""

    dest: str
    row: int = 0
    fix: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Plan:
    """A model described for our decoder: config, parts with shapes, tensors with places."""

    config: DecoderConfig
    shapes: dict[str, tuple[int, ...]]
    pieces: dict[str, Piece]  # checkpoint name without its prefix -> place


def plan_for(config: Any, context: int | None = None) -> Plan:
    """How to load a model with this transformers config. Raises Unsupported with the reason.

    context: longest sequence wanted; None is the model's own (for longrope: before its switch).
    """
    name = getattr(config, "model_type", None)
    if name not in FAMILIES:
        raise Unsupported(f"model type {name!r} is not one of {', '.join(sorted(FAMILIES))}")
    if getattr(config, "quantization_config", None) is not None:
        raise Unsupported("the checkpoint is quantised")
    c = FAMILIES[name](config, context)
    pieces = dict(gpt2_pieces(c) if name == "gpt2" else llama_pieces(c, name, rotary_size(config)))
    return Plan(c, shapes(c), pieces)


def canonical(name: str) -> str:
    """A checkpoint name without the prefix of the inner model."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


# --- configs -----------------------------------------------------------------------------------


def llama(config: Any, context: int | None) -> DecoderConfig:
    """What most families share; the others change fields of it."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    inv_freq, scale, limit = rope(config, context)
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        mlp_size=config.intermediate_size,
        context=limit,
        attn_scale=head_dim**-0.5,
        norm_eps=config.rms_norm_eps,
        act=activation(getattr(config, "hidden_act", "silu")),
        inv_freq=tuple(inv_freq.tolist()),
        rope_scale=scale,
        qkv_bias=bool(getattr(config, "attention_bias", False)),
        out_bias=bool(getattr(config, "attention_bias", False)),
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        is_tied=bool(config.tie_word_embeddings),
    )


def mistral(config: Any, context: int | None) -> DecoderConfig:
    """llama with one window for all layers; no biases. Also phi3."""
    windows = (getattr(config, "sliding_window", None),) * config.num_hidden_layers
    c = replace(llama(config, context), windows=windows if windows[0] else ())
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
    c = replace(llama(config, context), windows=windows if windows[0] else ())
    return replace(c, qk_norm="head", moe=moe, mlp_bias=False)


def gemma2(config: Any, context: int | None) -> DecoderConfig:
    """(1 + w) norms before and after, alternating windows, soft caps, scaled embeddings."""
    if getattr(config, "use_bidirectional_attention", None):
        raise Unsupported("bidirectional attention")
    return replace(
        llama(config, context),
        attn_scale=config.query_pre_attn_scalar**-0.5,
        norm_offset=1.0,
        norms="both",
        act=activation(config.hidden_activation),
        windows=typed_windows(config),
        attn_softcap=config.attn_logit_softcapping,
        logit_softcap=config.final_logit_softcapping,
        embed_scale=config.hidden_size**0.5,
        mlp_bias=False,
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
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "olmo2": olmo2,
    "phi3": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def activation(name: str) -> str:
    """Our name of a transformers activation."""
    if name not in ACTIVATION_NAMES:
        raise Unsupported(f"activation {name!r}")
    return ACTIVATION_NAMES[name]


def typed_windows(config: Any) -> tuple[int | None, ...]:
    """Window per layer from `layer_types`; empty if no layer has one."""
    types = config.layer_types
    strange = set(types) - {"full_attention", "sliding_attention"}
    if strange:
        raise Unsupported(f"layer type {strange.pop()!r}")
    windows = [config.sliding_window if t == "sliding_attention" else None for t in types]
    return tuple(windows) if any(windows) else ()


def rope(config: Any, context: int | None) -> tuple[Tensor, float, int]:
    """Inverse frequencies, scale of cos and sin, and the longest context they are meant for."""
    params = config.rope_parameters
    kind = params.get("rope_type", "default") if params else None
    limit = config.max_position_embeddings
    if kind not in ROPE_TYPES:
        raise Unsupported(f"rope type {kind!r}")
    if config.model_type != "phi3" and params.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("partial rotary embeddings")
    if kind == "default":
        dim = rotary_size(config)
        power = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / params["rope_theta"] ** power, 1.0, limit
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wanted = None
    if kind == "longrope":  # one table for all positions: short factors up to the switch, or long
        switch = params["original_max_position_embeddings"]
        limit = switch if context is None or context <= switch else limit
        wanted = limit
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=wanted)
    return inv_freq, float(scale), limit


def rotary_size(config: Any) -> int:
    """How many dimensions of a head rotate."""
    if config.model_type == "gpt2":
        return 0
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return int(head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))


# --- tensors -----------------------------------------------------------------------------------


def shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Parts of the decoder and their shapes."""
    d, out = c.hidden_size, {"embed": (c.vocab_size, c.hidden_size)}
    if c.inv_freq is None:
        out["positions"] = (c.context, d)
    if not c.is_tied:
        out["head.weight"] = (c.vocab_size, d)
    out |= _norm_shapes(c, "norm", d)
    for i in range(c.num_layers):
        for name, shape in _layer_shapes(c, i):
            out[f"layers.{i}.{name}"] = shape
    return out


def _layer_shapes(c: DecoderConfig, i: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, inner, lanes = c.hidden_size, c.num_heads * c.head_dim, c.num_lanes * c.head_dim
    yield from _linear_shapes("qkv", lanes, d, c.qkv_bias)
    yield from _linear_shapes("out", d, inner, c.out_bias)
    if c.moe and c.moe.layers[i]:
        yield "router.weight", (c.moe.num_experts, d)
        for e in range(c.moe.num_experts):
            yield f"experts.{e}.gate_up.weight", (2 * c.moe.size, d)
            yield f"experts.{e}.down.weight", (d, c.moe.size)
    else:
        up = ("gate_up", 2 * c.mlp_size) if c.is_gated else ("up", c.mlp_size)
        yield from _linear_shapes(*up, d, c.mlp_bias)
        yield from _linear_shapes("down", d, c.mlp_size, c.mlp_bias)
    for name in norm_names(c):
        yield from _norm_shapes(c, name, d).items()
    if c.qk_norm:
        wide = c.qk_norm == "width"
        yield "q_norm.weight", (inner if wide else c.head_dim,)
        yield "k_norm.weight", (c.num_kv_heads * c.head_dim if wide else c.head_dim,)


def norm_names(c: DecoderConfig) -> list[str]:
    """Norms of one layer."""
    before, after = ["attn_norm", "mlp_norm"], ["post_attn_norm", "post_mlp_norm"]
    return {"pre": before, "post": after, "both": before + after}[c.norms]


def _norm_shapes(c: DecoderConfig, name: str, width: int) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if c.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": (width,) for kind in kinds}


def _linear_shapes(
    name: str, rows: int, columns: int, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


NORMS = {  # checkpoint names by layout
    "pre": {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"},
    "post": {
        "post_attention_layernorm": "post_attn_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    },
    "both": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attn_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    },
}


def llama_pieces(c: DecoderConfig, family: str, rotary: int) -> Iterator[tuple[str, Piece]]:
    """Names of all families but gpt2."""
    yield "embed_tokens.weight", Piece("embed")
    yield "norm.weight", Piece("norm.weight")
    if not c.is_tied:
        yield "lm_head.weight", Piece("head.weight")
    for i in range(c.num_layers):
        at = f"layers.{i}."
        for name, piece in _layer_pieces(c, i, family == "phi3", rotary):
            yield at + name, replace(piece, dest=at + piece.dest)


def _layer_pieces(
    c: DecoderConfig, i: int, is_fused: bool, rotary: int
) -> Iterator[tuple[str, Piece]]:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    turn = None if rotary == c.head_dim else _turn(c, rotary, is_fused)
    for kind in ("weight", "bias") if c.qkv_bias else ("weight",):
        if is_fused:
            yield f"self_attn.qkv_proj.{kind}", Piece(f"qkv.{kind}", 0, turn)
        else:
            for name, row in (("q", 0), ("k", q), ("v", q + kv)):
                yield f"self_attn.{name}_proj.{kind}", Piece(f"qkv.{kind}", row)
    for kind in ("weight", "bias") if c.out_bias else ("weight",):
        yield f"self_attn.o_proj.{kind}", Piece(f"out.{kind}")
    if c.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield f"self_attn.{name}.weight", Piece(f"{name}.weight")
    for name, dest in NORMS[c.norms].items():
        yield f"{name}.weight", Piece(f"{dest}.weight")
    if c.moe and c.moe.layers[i]:
        yield "mlp.gate.weight", Piece("router.weight")
        for e in range(c.moe.num_experts):
            yield from _mlp_pieces(f"mlp.experts.{e}.", f"experts.{e}.", c.moe.size, False, False)
    else:
        yield from _mlp_pieces("mlp.", "", c.mlp_size, c.mlp_bias, is_fused)


def _mlp_pieces(
    source: str, dest: str, size: int, bias: bool, is_fused: bool
) -> Iterator[tuple[str, Piece]]:
    for kind in ("weight", "bias") if bias else ("weight",):
        if is_fused:
            yield f"{source}gate_up_proj.{kind}", Piece(f"{dest}gate_up.{kind}")
        else:
            yield f"{source}gate_proj.{kind}", Piece(f"{dest}gate_up.{kind}")
            yield f"{source}up_proj.{kind}", Piece(f"{dest}gate_up.{kind}", size)
        yield f"{source}down_proj.{kind}", Piece(f"{dest}down.{kind}")


def _turn(c: DecoderConfig, rotary: int, is_fused: bool) -> Callable[[Tensor], Tensor]:
    """Reorders the dimensions of query and key heads as `Rope` wants them."""
    assert is_fused, "only phi3 rotates a part of the head"
    order = torch.tensor(roll_order(c.head_dim, rotary))
    num = c.num_heads + c.num_kv_heads
    turned = (torch.arange(num)[:, None] * c.head_dim + order).reshape(-1)
    rows = torch.cat((turned, torch.arange(num * c.head_dim, c.num_lanes * c.head_dim)))
    return lambda weight: weight.index_select(0, rows)


def gpt2_pieces(c: DecoderConfig) -> Iterator[tuple[str, Piece]]:
    """Names of gpt2, whose Conv1D weights are stored [in, out]."""
    yield "wte.weight", Piece("embed")
    yield "wpe.weight", Piece("positions")
    if not c.is_tied:
        yield "lm_head.weight", Piece("head.weight")
    for kind in ("weight", "bias"):
        yield f"ln_f.{kind}", Piece(f"norm.{kind}")
        fix = torch.t if kind == "weight" else None
        for i in range(c.num_layers):
            for name, dest in (("ln_1", "attn_norm"), ("ln_2", "mlp_norm")):
                yield f"h.{i}.{name}.{kind}", Piece(f"layers.{i}.{dest}.{kind}")
            for name, dest in (
                ("attn.c_attn", "qkv"),
                ("attn.c_proj", "out"),
                ("mlp.c_fc", "up"),
                ("mlp.c_proj", "down"),
            ):
                yield f"h.{i}.{name}.{kind}", Piece(f"layers.{i}.{dest}.{kind}", 0, fix)
