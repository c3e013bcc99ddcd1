"""Head and MLP sizes rounded up to whole lanes at load, so that the kernels run any of them.

All that is added is zero and stays zero, so a pass says what it said:
    MLP    act(0) = 0 in the new channels, and zero columns of `down` read them
    heads  d becomes D: each half grows at its end, so rotary pairs stay pairs and the new ones turn
           zeros; products of queries and keys gain zeros, and so do values, which zero columns of
           `out` read; the scale of attention stays that of d
    norms  of queries and keys divide by a root mean square that the zeros lower: with eps d / D in
           place of eps they give sqrt(D / d) times as much, and the scale of attention takes d / D
The residual row stays as it is: all of its norms would have to know.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from forerun.models.transformer import DecoderConfig
from forerun.runner.native.decoder import missing
from forerun.runner.native.layout import LANES

HEADS = {"qkv": 0, "q_norm": 0, "k_norm": 0, "out": 1}  # parts, and the axis that is padded
CHANNELS = {"gate_up": 0, "up": 0, "down": 1}


def in_lanes(c: DecoderConfig) -> DecoderConfig:
    """The config with whole lanes; `c` itself if the kernels would not run that either."""
    if c.ropes and c.head_dim % 2:  # no halves
        return c
    if c.qk_norm and c.norm == "layer":  # zeros would move its mean
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
    return c if missing(wide) else wide


def in_whole_lanes(size: int) -> int:
    """The next multiple of LANES."""
    return -(-size // LANES) * LANES


def widened(name: str, part: Tensor, before: DecoderConfig, after: DecoderConfig) -> Tensor:
    """A part of the decoder, by its name in `names.shapes`, with the zeros of `after` in it."""
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
    if size == wide or axis == part.dim():  # or a bias of outputs that stay
        return part
    groups = part.unflatten(axis, (-1, size))
    zeros = [0, 0] * (groups.dim() - axis - 2) + [0, wide - size]  # pad counts axes from the last
    return F.pad(groups, zeros).flatten(axis, axis + 1)
