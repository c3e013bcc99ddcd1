"""Random models made on the device, and runners over them: our graphs, and torch without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core.dice import SeededDice
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, TreeBuilder
from forerun.models.layers import GatedMLP, Linear, RMSNorm
from forerun.models.transformer import DecoderConfig, Layer, RopeConfig, Transformer
from forerun.models.weight_map import norm_names
from forerun.runner.attention import TorchDecoder
from forerun.runner.gpu.graphs import GraphDecoder
from forerun.runner.model_runner import ModelRunner

THETA = 500_000.0  # base of the rotary frequencies


def config(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    dim: int,
    inner: int,
    vocab: int,
    **more: Any,
) -> DecoderConfig:
    """A llama of these sizes; `more` are other fields of a decoder's config."""
    exponents = np.arange(0, dim, 2) / dim
    fields: dict[str, Any] = {
        "context": 32768,
        "attn_scale": dim**-0.5,
        "ropes": (RopeConfig(tuple((THETA**-exponents).tolist())),),
    }
    return DecoderConfig(vocab, hidden, layers, heads, kv_heads, dim, inner, **(fields | more))


SIZES = {
    "1B": config(2048, 16, 32, 8, 64, 8192, 128256, is_tied=True),  # 1.24e9 weights
    "8B": config(4096, 32, 32, 8, 128, 14336, 128256),  # 8.03e9
    "tiny": config(32, 2, 2, 1, 16, 48, 96),
}


def random_decoder(
    c: DecoderConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Transformer:
    """A decoder with random weights, made where it runs."""
    chance = torch.Generator(device).manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        return made.normal_(0.0, shape[-1] ** -0.5, generator=chance)

    def linear(rows: int, inner: int, bias: bool, is_gated: bool = False) -> Linear:
        given = weight(1, rows)[0] if bias else None
        return Linear(weight(rows, inner), given, is_gated=is_gated, pack=False)

    def norm(width: int) -> RMSNorm:
        return RMSNorm(torch.ones(width, dtype=dtype, device=device), c.norm_eps, c.norm_offset)

    def layer() -> Layer:
        norms = {name: norm(c.hidden_size) for name in norm_names(c)}
        if c.qk_norm:
            norms |= {"q_norm": norm(c.head_dim), "k_norm": norm(c.head_dim)}
        both = linear(2 * c.mlp_size, c.hidden_size, c.mlp_bias, is_gated=True)
        mlp = GatedMLP(both, linear(c.hidden_size, c.mlp_size, c.mlp_bias), c.act)
        qkv = linear(c.num_lanes * c.head_dim, c.hidden_size, c.qkv_bias)
        out = linear(c.hidden_size, c.num_heads * c.head_dim, c.out_bias)
        return Layer(qkv, out, mlp, **norms)

    layers = [layer() for _ in range(c.num_layers)]
    table = weight(c.vocab_size, c.hidden_size)
    table.mul_(c.hidden_size**0.5 if not c.is_tied else 1.0)
    head = table if c.is_tied else weight(c.vocab_size, c.hidden_size)
    embed = None if c.is_tied else table
    return Transformer(c, embed, layers, norm(c.hidden_size), Linear(head, pack=False))


def widened(model: Transformer, dtype: torch.dtype = torch.float32) -> Transformer:
    """The same weights in another number type."""

    def linear(part: Linear) -> Linear:
        assert part.weight is not None
        bias = None if part.bias is None else part.bias.to(dtype)
        return Linear(part.weight.to(dtype), bias, pack=False)

    def norm(part: Any) -> Any:
        if part is None:
            return None
        return RMSNorm(
            (part.weight - model.config.norm_offset).to(dtype), part.eps, model.config.norm_offset
        )

    layers = [
        replace(
            one,
            qkv=linear(one.qkv),
            out=linear(one.out),
            mlp=GatedMLP(linear(one.mlp.gate_up), linear(one.mlp.down), one.mlp.name),  # type: ignore[union-attr]
            **{
                name: norm(getattr(one, name))
                for name in ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm")
            },
            q_norm=norm(one.q_norm),
            k_norm=norm(one.k_norm),
        )
        for one in model.layers
    ]
    embed = None if model.embed is None else model.embed.to(dtype)
    return Transformer(model.config, embed, layers, norm(model.norm), linear(model.head))


def on_graphs(model: Transformer, *, context: int, max_seqs: int = 16) -> ModelRunner:
    """A runner with graph passes; on a CPU Triton's interpreter runs the same kernels."""
    runner = ModelRunner(model, max_seqs=max_seqs, context=context)
    runner.decode = GraphDecoder(model)
    return runner


def on_torch(model: Transformer, *, context: int, max_seqs: int = 16) -> ModelRunner:
    """A runner with torch passes."""
    runner = ModelRunner(model, max_seqs=max_seqs, context=context)
    runner.decode = TorchDecoder(model)
    return runner


def text(length: int, vocab: int, seed: int = 0) -> Sequence:
    """A sequence of random tokens."""
    tokens = np.random.default_rng([seed, length]).integers(0, vocab, length).tolist()
    return Sequence(tokens, length, Sampling(), SeededDice(seed), limit=1 << 30, index=seed)


def tree(nodes: int, vocab: int) -> Tree:
    """A tree of so many nodes, with up to two children each."""
    builder = TreeBuilder()
    for node in range(nodes):
        builder.add((7 * node + 3) % vocab, (node - 2) // 2 if node > 1 else -1)
    return builder.build()


def fill(runner: ModelRunner, seq: Sequence, seed: int = 0) -> None:
    """Random keys and values for all tokens of a sequence but the last: nothing is computed."""
    slot = runner.cache.sync(seq)
    length = len(seq.tokens) - 1
    runner.cache.reserve(slot, length + 300)
    cells = runner.cache.data[:, slot.index, :length]
    chance = torch.Generator(cells.device).manual_seed(seed)
    # [layers, length, 2, heads, size]; the same numbers whatever the number type
    made = torch.empty(cells.shape, dtype=torch.bfloat16, device=cells.device)
    cells.copy_(made.normal_(generator=chance))
    slot.tokens[:] = seq.tokens[:-1]


def wait(device: torch.device) -> None:
    """Until the device has computed all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
