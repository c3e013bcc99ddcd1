"""Pads head and MLP sizes with zeros to whole lanes at load, as the kernels require.

The outputs do not change:
    MLP    act(0) = 0 in the new channels, and the columns of `down` for them are zero
    heads  size d becomes D: each half is padded at its end, so rotary pairs stay pairs and the new
           pairs are zero; new products of queries and keys are zero; new values meet zero columns
           of `out`; the scale of attention stays that of d
    norms  of queries and keys: the zeros lower the root mean square. With eps d / D in place of eps
           the result is sqrt(D / d) times larger; the scale of attention is multiplied by d / D
The residual stream is not padded.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from forerun.models.transformer import DecoderConfig
from forerun.runner.native.decoder import unsupported_config
from forerun.runner.native.layout import LANES

HEADS = {"qkv": 0, "q_norm": 0, "k_norm": 0, "out": 1}  # part -> padded axis
CHANNELS = {"gate_up": 0, "up": 0, "down": 1}


def in_lanes(c: DecoderConfig) -> DecoderConfig:
    """The config with whole lanes; `c` itself if the kernels do not support it even then."""
    if c.ropes and c.head_dim % 2:  # rotary embeddings need two halves
        return c
    if c.qk_norm and c.norm == "layer":  # zeros would change the mean
        return c
    head_dim = in_whole_lanes(c.head_dim)
    share = c.head_dim / head_dim if c.qk_norm else 1.0
    wide = replace(
        c,
        head_dim=head_dim,
        mlp_size=in_whole_lanes(c.mlp_size),
        layer_mlp_sizes=tuple(map(in_whole_lanes, c.layer_mlp_sizes)),
        attn_scale=c.attn_scale * share,
    )
    return c if unsupported_config(wide) else wide


def in_whole_lanes(size: int) -> int:
    """The next multiple of LANES."""
    return -(-size // LANES) * LANES


def widened(name: str, part: Tensor, before: DecoderConfig, after: DecoderConfig) -> Tensor:
    """A part of the decoder, by its name in `weight_map.shapes`, padded to the sizes of `after`."""
    words = name.split(".")
    kind = words[-2:][0]
    if kind in HEADS:
        axis, halves = HEADS[kind], 2 if before.ropes else 1
        size, wide = before.head_dim // halves, after.head_dim // halves
    elif kind in CHANNELS:
        layer = int(words[1])
        axis, size, wide = CHANNELS[kind], before.mlp(layer), after.mlp(layer)
    else:
        return part
    if size == wide or axis == part.dim():  # or a bias of outputs that are not padded
        return part
    groups = part.unflatten(axis, (-1, size))
    zeros = [0, 0] * (groups.dim() - axis - 2) + [0, wide - size]  # pad counts axes from the last
    return F.pad(groups, zeros).flatten(axis, axis + 1)
