"""Layers for trained drafters, as torch modules with the tensor names of transformers."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.errors import ConfigError
from forerun.models.layers import ACTIVATIONS
from forerun.models.transformer import DecoderConfig, RopeConfig

KeyValues = tuple[Tensor, Tensor]  # keys and values [b, KV, n, D]


class ResBlock(nn.Module):
    """x + SiLU(W x + b) of rows [..., d]; W and b start at 0, so it is the identity at first.

    Cai et al., Medusa, 2024.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Fusion(nn.Module):
    """Projects `num` rows [..., d] per position, concatenated to [..., num d], by W [d, num d].

    EAGLE fuses a token's embedding with the previous feature; EAGLE-3 fuses the residual streams
    after three layers (Li et al. 2024, 2025).
    """

    def __init__(self, num: int, size: int, out: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(num * size, out or size, bias=bias)

    def forward(self, rows: Many[Tensor]) -> Tensor:
        return self.fc(torch.cat(list(rows), dim=-1))


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer with RoPE, grouped queries and a gated MLP.

    config: that of the target, see `models.families.plan_for`. input_size: width of the input of
    attention. If it is not the hidden size (2 d in EAGLE-3), `forward` needs `residual`.
    """

    def __init__(self, config: DecoderConfig, input_size: int | None = None) -> None:
        super().__init__()
        _check(config)
        size = config.hidden_size
        self.input_layernorm = nn.RMSNorm(input_size or size, config.norm_eps)
        self.self_attn = Attention(config, input_size or size)
        self.post_attention_layernorm = nn.RMSNorm(size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        past: KeyValues | None = None,
        mask: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, KeyValues]:
        """Rows [b, n, d], and keys and values of past and new rows, for x [b, n, input_size].

        positions int64 [b, n] or [n]. past: keys and values of earlier rows. mask: bool (True:
        visible) or additive, broadcast to [b, heads, n, past + n]; default: causal. residual
        [b, n, d]: added to the output of attention; default x.
        """
        h, cells = self.self_attn(self.input_layernorm(x), positions, past, mask)
        x = (x if residual is None else residual) + h
        return x + self.mlp(self.post_attention_layernorm(x)), cells


class Attention(nn.Module):
    """Causal attention with RoPE; query heads share keys and values in groups."""

    def __init__(self, config: DecoderConfig, input_size: int) -> None:
        super().__init__()
        c, dim = config, config.head_dim
        self.head_dim, self.scale = dim, c.attn_scale
        self.q_proj = nn.Linear(input_size, c.num_heads * dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(input_size, c.num_kv_heads * dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(input_size, c.num_kv_heads * dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * dim, c.hidden_size, bias=c.out_bias)
        self.rotary = Rotary(c.ropes[0])

    def forward(
        self, x: Tensor, positions: Tensor, past: KeyValues | None, mask: Tensor | None
    ) -> tuple[Tensor, KeyValues]:
        """Rows [b, n, d], and keys and values of past and new rows."""
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (
            part(x).view(shape).transpose(1, 2)  # [b, heads, n, D]
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotary(q, k, positions)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        if mask is None:
            mask = _causal(q.shape[2], k.shape[2], x.device)
        h = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True
        )
        return self.o_proj(h.transpose(1, 2).flatten(2)), (k, v)


class MLP(nn.Module):
    """down(act(gate x) * up x)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.mlp_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.act = ACTIVATIONS[config.act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Rotary(nn.Module):
    """Rotates dimension pairs (i, i + D / 2) of heads by position * inv_freq[i]."""

    inv_freq: Tensor  # [D / 2]

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor(rope.inv_freq), persistent=False)
        self.scale = rope.scale

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q, k [b, heads, n, D]; positions [b, n] or [n]."""
        angles = positions[..., None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], -1)
        angles = angles[:, None] if angles.ndim == 3 else angles  # over heads
        cos, sin = ((f(angles) * self.scale).to(q.dtype) for f in (torch.cos, torch.sin))
        return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def _turned(x: Tensor) -> Tensor:
    """(-second half, first half) of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _causal(rows: int, keys: int, device: torch.device) -> Tensor:
    """Causal mask, bool [rows, keys]; the last `rows` keys belong to the rows."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)


def _check(config: DecoderConfig) -> None:
    """Raises ConfigError for families with another layer type."""
    is_plain = (
        config.norm == "rms"
        and config.norms == "pre"
        and config.is_gated
        and config.ropes
        and not config.qk_norm
        and config.norm_offset == 0
        and config.residual_scale == 1
    )
    if not is_plain:
        raise ConfigError(
            "a trained decoder layer needs pre-norm RMSNorm, RoPE and a gated MLP, as in llama and "
            "qwen2, but the layers of this target differ; use a llama config of the target's width"
        )
