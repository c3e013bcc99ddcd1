"""Parts of the decoder, their shapes, and the checkpoint tensors that fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.models.rope import roll_order
from forerun.models.transformer import DecoderConfig

PREFIXES = ("model.", "transformer.")
IGNORED = (  # tables and masks in old checkpoints
    "rotary_emb.inv_freq",
    ".masked_bias",
    ".causal_mask",
    ".attn.bias",
    ".attention.bias",
)


@dataclass(frozen=True)
class Piece:
    """Where a checkpoint tensor goes: rows from `row` on of part `dest`, after `fix`."""

    dest: str
    row: int = 0
    fix: Callable[[Tensor], Tensor] | None = None


def canonical(name: str) -> str:
    """A checkpoint name without the prefix of the inner model."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def listed(names: list[str]) -> str:
    """The first three names and the number of further ones."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def missing_message(names: list[str]) -> str:
    """The error message for missing tensors."""
    return f"the checkpoint lacks {listed(names)}; is it complete, and is config.json its own?"


def shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Parts of the decoder and their shapes."""
    d = c.hidden_size
    out: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, d)}
    if not c.ropes:
        out["positions"] = (c.context, d)
    if not c.is_tied:
        out["head.weight"] = (c.num_logits, d)
    out |= _norm_shapes(c, "norm", d)
    for i in range(c.num_layers):
        for name, shape in _layer_shapes(c, i):
            out[f"layers.{i}.{name}"] = shape
    return out


def _layer_shapes(c: DecoderConfig, i: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, inner, kv = c.hidden_size, c.heads(i) * c.head_dim, c.kv_heads(i) * c.head_dim
    lanes, width = inner + 2 * kv, c.mlp(i)
    yield from _linear_shapes("qkv", lanes, d, c.qkv_bias)
    yield from _linear_shapes("out", d, inner, c.out_bias)
    if c.moe and c.moe.layers[i]:
        yield "router.weight", (c.moe.num_experts, d)
        for e in range(c.moe.num_experts):
            yield f"experts.{e}.gate_up.weight", (2 * c.moe.size, d)
            yield f"experts.{e}.down.weight", (d, c.moe.size)
    else:
        up = ("gate_up", 2 * width) if c.is_gated else ("up", width)
        yield from _linear_shapes(*up, d, c.mlp_bias)
        yield from _linear_shapes("down", d, width, c.mlp_bias)
    for name in norm_names(c):
        yield from _norm_shapes(c, name, d).items()
    if c.qk_norm:
        wide = c.qk_norm == "width"
        yield "q_norm.weight", (inner if wide else c.head_dim,)
        yield "k_norm.weight", (kv if wide else c.head_dim,)


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


def llama_pieces(c: DecoderConfig, family: str) -> Iterator[tuple[str, Piece]]:
    """Tensor names of all families except gpt2."""
    yield "embed_tokens.weight", Piece("embed")
    yield "norm.weight", Piece("norm.weight")
    if not c.is_tied:
        yield "lm_head.weight", Piece("head.weight")
    for i in range(c.num_layers):
        at = f"layers.{i}."
        for name, piece in _layer_pieces(c, i, family == "phi3"):
            yield at + name, replace(piece, dest=at + piece.dest)


def _layer_pieces(c: DecoderConfig, i: int, is_fused: bool) -> Iterator[tuple[str, Piece]]:
    q, kv = c.heads(i) * c.head_dim, c.kv_heads(i) * c.head_dim
    rotary = 2 * len(c.ropes[0].inv_freq)
    turn = None if rotary == c.head_dim else _turn(c, i, rotary, is_fused)
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
        yield from _mlp_pieces("mlp.", "", c.mlp(i), c.mlp_bias, is_fused)


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


def _turn(c: DecoderConfig, i: int, rotary: int, is_fused: bool) -> Callable[[Tensor], Tensor]:
    """Reorders the dimensions of query and key heads for `Rope`."""
    assert is_fused, "only phi3 rotates a part of the head"
    order = torch.tensor(roll_order(c.head_dim, rotary))
    num = c.heads(i) + c.kv_heads(i)
    turned = (torch.arange(num)[:, None] * c.head_dim + order).reshape(-1)
    rest = torch.arange(num * c.head_dim, (num + c.kv_heads(i)) * c.head_dim)
    rows = torch.cat((turned, rest))

    def reorder(weight: Tensor) -> Tensor:
        fits = len(weight) == len(rows)  # a wrong shape raises an error later
        return weight.index_select(0, rows) if fits else weight

    return reorder


def gpt2_pieces(c: DecoderConfig) -> Iterator[tuple[str, Piece]]:
    """Tensor names of gpt2; its Conv1D weights are stored [in, out]."""
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
