"""One decoder for many model families, which differ in a frozen config.

Rows of all sequences are packed into [R, d]. Positions and attention are arguments, so prefill, one
step and a tree pass use the same code. Per layer: norm, fused qkv, rope, cache write, attention,
out, norm, fused gate and up, product, down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.layers import Experts, GatedMLP, LayerNorm, Linear, Norm, PlainMLP, RMSNorm
from forerun.models.rope import Rope

if TYPE_CHECKING:
    from forerun.models.vocab_map import VocabMap

Attend = Callable[[int, Tensor], Tensor]  # (layer, qkv [R, H + 2 KV, D]) -> [R, H D]


@dataclass(frozen=True)
class Moe:
    """Mixture layers: which ones, how many experts, how many of them per token."""

    layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    size: int  # inner width of one expert
    normalise: bool


@dataclass(frozen=True)
class RopeConfig:
    """One rotary table: pair i of a head turns by position * inv_freq[i]; scale: of cos and sin."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class DecoderConfig:
    """The settings in which model families differ."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    context: int
    attn_scale: float
    norm: str = "rms"  # or "layer"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # gemma: weights are stored as w - 1
    norms: str = "pre"  # "pre", "post" (olmo2) or "both" (gemma2)
    act: str = "silu"
    is_gated: bool = True
    qk_norm: str = ""  # "head" (qwen3), "width" (olmo2)
    ropes: tuple[RopeConfig, ...] = ()  # empty: learned positions
    layer_ropes: tuple[int | None, ...] = ()  # index into ropes, None: no rotation; empty: all 0
    windows: tuple[int | None, ...] = ()  # per layer; empty: full attention in all layers
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    logit_divisor: float = 1.0  # granite
    embed_scale: float | None = None
    rounds_embed_scale: bool = False  # gemma: the scale itself is rounded to the model's dtype
    residual_scale: float = 1.0  # granite: of what attention and MLP add
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    is_tied: bool = False
    head_size: int = 0  # rows of a head reduced to some tokens; 0: all tokens
    moe: Moe | None = None
    # pruned models: sizes per layer, empty if all are equal; the fields above hold the largest
    layer_heads: tuple[int, ...] = ()
    layer_kv_heads: tuple[int, ...] = ()
    layer_mlp_sizes: tuple[int, ...] = ()

    @property
    def num_logits(self) -> int:
        """Rows of the head."""
        return self.head_size or self.vocab_size

    @property
    def num_lanes(self) -> int:
        """Heads in one row of the fused projection: queries, keys, values."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def has_even_heads(self) -> bool:
        """Whether all layers have the same number of query and KV heads."""
        return not self.layer_heads and not self.layer_kv_heads

    def heads(self, layer: int) -> int:
        """Query heads of a layer."""
        return self.layer_heads[layer] if self.layer_heads else self.num_heads

    def kv_heads(self, layer: int) -> int:
        """KV heads of a layer."""
        return self.layer_kv_heads[layer] if self.layer_kv_heads else self.num_kv_heads

    def mlp(self, layer: int) -> int:
        """Inner width of a layer's MLP."""
        return self.layer_mlp_sizes[layer] if self.layer_mlp_sizes else self.mlp_size

    def window(self, layer: int) -> int | None:
        """Attention window of a layer, including the position itself; None: full attention."""
        return self.windows[layer] if self.windows else None

    def rope(self, layer: int) -> int | None:
        """Index of a layer's rotary table; None: its heads are not rotated."""
        if not self.ropes:
            return None
        return self.layer_ropes[layer] if self.layer_ropes else 0


@dataclass
class Layer:
    """Weights of one layer; a norm that the family lacks is None."""

    qkv: Linear
    out: Linear
    mlp: GatedMLP | PlainMLP | Experts
    attn_norm: Norm | None = None
    post_attn_norm: Norm | None = None
    mlp_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None


class Transformer:
    """A decoder that computes hidden rows [R, d]; it keeps no state between passes."""

    def __init__(
        self,
        config: DecoderConfig,
        embed: Tensor | None,  # [V, d]; None: the rows of the head
        layers: list[Layer],
        norm: RMSNorm | LayerNorm,
        head: Linear,
        positions: Tensor | None = None,  # [context, d], learned
        head_map: VocabMap | None = None,  # the token of each row of a reduced head
    ) -> None:
        self.head_map = head_map
        self.config, self.layers, self.norm, self.head = config, layers, norm, head
        self.embed, self.positions = embed, positions
        self.version = 0  # counts updates of the weights
        # set by the loader
        self.update_weights: Callable[[Mapping[str, Tensor]], None] | None = None
        self.dtype, self.device = head.dtype, head.device
        self.ropes = [
            Rope(torch.tensor(r.inv_freq), config.head_dim, r.scale, self.dtype, self.device)
            for r in config.ropes
        ]
        self.embed_scale = config.embed_scale
        if config.embed_scale is not None and config.rounds_embed_scale:
            self.embed_scale = torch.tensor(config.embed_scale, dtype=self.dtype).item()

    def rows(self, ids: Tensor) -> Tensor:
        """Embeddings [n, d] of token ids, unscaled."""
        return self.head.rows(ids) if self.embed is None else F.embedding(ids, self.embed)

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        top: int,
        attend: Attend,
        table: Tensor | None = None,
    ) -> Tensor:
        """Hidden rows [R, d] after the last norm. ids, positions: int64 [R]; top: max position.

        table [n, d]: embeddings that ids index, instead of the token embeddings.
        """
        x = self.embedded(ids, positions, table)
        turns = self.turns(positions, top)
        for i in range(self.config.num_layers):
            x = self.layer(i, x, turns, attend)
        return self.norm(x)

    def embedded(self, ids: Tensor, positions: Tensor, table: Tensor | None = None) -> Tensor:
        """The input [R, d] of the first layer; arguments as in `__call__`."""
        x = self.rows(ids) if table is None else F.embedding(ids, table)
        if self.embed_scale is not None:
            x = x * self.embed_scale
        if self.positions is not None:
            x = x + F.embedding(positions, self.positions)
        return x

    def turns(self, positions: Tensor, top: int) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of these positions, per rotary table."""
        return [rope.rows(positions, top) for rope in self.ropes]

    def layer(
        self, i: int, x: Tensor, turns: list[tuple[Tensor, Tensor]], attend: Attend
    ) -> Tensor:
        """Residual rows [R, d] after layer i."""
        c, layer = self.config, self.layers[i]
        heads, kv_heads, half = c.heads(i), c.kv_heads(i), c.head_dim // 2
        h = x if layer.attn_norm is None else layer.attn_norm(x)
        qkv = layer.qkv(h).view(len(x), heads + 2 * kv_heads, c.head_dim)
        if layer.q_norm is not None:
            self._normalise(layer, qkv, heads, kv_heads)
        if (rope := c.rope(i)) is not None:
            cos, sin = turns[rope]
            qk = qkv.narrow(1, 0, heads + kv_heads)
            turned = qk.roll(half, -1)
            qk.mul_(cos).addcmul_(turned, sin)
        h = layer.out(attend(i, qkv))
        x = self._added(x, h if layer.post_attn_norm is None else layer.post_attn_norm(h))
        h = layer.mlp(x if layer.mlp_norm is None else layer.mlp_norm(x))
        return self._added(x, h if layer.post_mlp_norm is None else layer.post_mlp_norm(h))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, num_logits] of hidden rows [n, d]."""
        logits = self.head(hidden)
        if self.config.logit_divisor != 1:
            logits = logits.div_(self.config.logit_divisor)
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _added(self, x: Tensor, part: Tensor) -> Tensor:
        """The residual rows with the output of attention or MLP."""
        scale = self.config.residual_scale
        return x + part if scale == 1 else x + part * scale

    def _normalise(self, layer: Layer, qkv: Tensor, heads: int, kv_heads: int) -> None:
        """QK-norm in place: per head, or over the whole width."""
        for norm, at, num in ((layer.q_norm, 0, heads), (layer.k_norm, heads, kv_heads)):
            part = qkv.narrow(1, at, num)
            flat = part if self.config.qk_norm == "head" else part.flatten(1)
            part.copy_(norm(flat).view(part.shape))  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        tables = [t for t in (self.embed, self.positions) if t is not None]
        parts = [*self.linears(), *self.norms()]
        return sum(t.nbytes for t in tables) + sum(part.nbytes for part in parts)

    def linears(self) -> list[Linear]:
        """Every product with weights, in the order of one pass (each expert counted)."""
        found: list[Linear] = []
        for layer in self.layers:
            found += [layer.qkv, layer.out]
            mlp = layer.mlp
            if isinstance(mlp, Experts):
                found.append(mlp.gate)
            for part in mlp.experts if isinstance(mlp, Experts) else [mlp]:
                found += [part.gate_up if isinstance(part, GatedMLP) else part.up, part.down]
        return [*found, self.head]

    def norms(self) -> list[Norm]:
        """Every norm."""
        found = [
            norm
            for layer in self.layers
            for norm in (
                layer.attn_norm,
                layer.post_attn_norm,
                layer.mlp_norm,
                layer.post_mlp_norm,
                layer.q_norm,
                layer.k_norm,
            )
        ]
        return [*(norm for norm in found if norm is not None), self.norm]
