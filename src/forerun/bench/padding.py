"""Padding of a small llama's weights to a larger model with the same outputs.

New heads and inner channels have zero output weights, new layers write nothing, new residual
channels are zero. All other new weights are random, so that no work can be skipped.

Width d grows to D = 2^k d; for odd k the residual row is stored twice. With r = 1 or 2 copies the
mean of squares is r d / D of the old one. An eps of (r d / D) eps and norm weights times
sqrt(r d / D) / r give every reader, which sums over the copies, its old input. Both factors are
powers of two, hence exact in any dtype. The head size, and with it rope and the attention scale,
the assignment of query heads to KV heads, and the vocabulary stay.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ModelError

RANDOM_STD = 0.02  # of new weights
POOL_SIZE = 4_194_301  # random weights drawn; a prime, so that no two rows are equal
MAX_INNER_RATIO = 4.5  # inner channels per residual channel


@dataclass(frozen=True)
class Shape:
    """The sizes of a checkpoint that determine the cost of a pass."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    is_tied: bool

    @property
    def parameters(self) -> int:
        """Weights of embeddings and layers, without norms and biases."""
        tables = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return tables + self.layers * (self.attention + 3 * self.hidden * self.inner)

    @property
    def attention(self) -> int:
        """Weights of one layer's attention."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)


@dataclass(frozen=True)
class Size:
    """The target sizes of a name; queries are as wide as the model."""

    parameters: float
    hidden: int
    layers: int
    kv_width: int


SIZES = {
    "30M": Size(0.03e9, 512, 8, 128),
    "0.1B": Size(0.1e9, 768, 9, 256),
    "0.3B": Size(0.3e9, 1024, 24, 256),
    "1B": Size(1.0e9, 2048, 16, 512),
    "8B": Size(8.0e9, 4096, 32, 1024),
}


def shape_of(config: dict[str, Any]) -> Shape:
    """The shape of a config.json. Raises ModelError for a missing field."""
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return Shape(
            hidden,
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config["intermediate_size"],
            config["vocab_size"],
            bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ModelError(f"config.json has no {error}; is it a model folder?") from None


def grown(small: Shape, size: str) -> Shape:
    """The shape of a target size that contains `small`. Raises ModelError if there is none."""
    goal = SIZES[size]
    for k in range(max(0, round(math.log2(goal.hidden / small.hidden))), -1, -1):
        for layers in range(max(small.layers, goal.layers), 4 * max(small.layers, goal.layers)):
            big = _widened(small, goal, k, layers)
            if small.inner <= big.inner <= max(MAX_INNER_RATIO * big.hidden, small.inner):
                return big
    raise ModelError(
        f"a model of {small.parameters / 1e9:.3g}B with {small.layers} layers does not fit into "
        f"{size}; sizes are {', '.join(SIZES)}"
    )


def _widened(small: Shape, goal: Size, k: int, layers: int) -> Shape:
    """The shape 2^k times as wide, with inner channels to match the number of weights.

    Heads grow with the width: transformers needs the width to be a multiple of their number.
    """
    hidden, heads, kv_heads = small.hidden << k, small.heads << k, small.kv_heads
    while 2 * kv_heads * small.head_dim <= goal.kv_width and kv_heads < small.kv_heads << k:
        kv_heads *= 2
    big = replace(small, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, inner=0)
    inner = (goal.parameters - big.parameters) / (3 * hidden * layers)
    return replace(big, inner=64 * round(inner / 64))


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint and its axes."""

    name: str
    axes: tuple[str, ...]
    writes_residual: bool = False  # then padded with zeros
    is_norm: bool = False

    @property
    def is_optional(self) -> bool:
        """Whether only some families have it."""
        return "bias" in self.name or self.axes == ("head",)


LAYER = (
    Part("input_layernorm.weight", ("hidden",), is_norm=True),
    Part("self_attn.q_proj.weight", ("q", "hidden")),
    Part("self_attn.k_proj.weight", ("kv", "hidden")),
    Part("self_attn.v_proj.weight", ("kv", "hidden")),
    Part("self_attn.o_proj.weight", ("hidden", "q"), writes_residual=True),
    Part("self_attn.q_norm.weight", ("head",), is_norm=True),
    Part("self_attn.k_norm.weight", ("head",), is_norm=True),
    Part("self_attn.q_proj.bias", ("q",)),
    Part("self_attn.k_proj.bias", ("kv",)),
    Part("self_attn.v_proj.bias", ("kv",)),
    Part("self_attn.o_proj.bias", ("hidden",), writes_residual=True),
    Part("post_attention_layernorm.weight", ("hidden",), is_norm=True),
    Part("mlp.gate_proj.weight", ("inner", "hidden")),
    Part("mlp.up_proj.weight", ("inner", "hidden")),
    Part("mlp.down_proj.weight", ("hidden", "inner"), writes_residual=True),
    Part("mlp.gate_proj.bias", ("inner",)),
    Part("mlp.up_proj.bias", ("inner",)),
    Part("mlp.down_proj.bias", ("hidden",), writes_residual=True),
)
EMBED = Part("model.embed_tokens.weight", ("vocab", "hidden"), writes_residual=True)
NORM = Part("model.norm.weight", ("hidden",), is_norm=True)
HEAD = Part("lm_head.weight", ("vocab", "hidden"))


def tensors(big: Shape, small: Shape, layer: tuple[Part, ...]) -> Iterator[tuple[str, Part, bool]]:
    """Name, part, and whether the small model has it, of all tensors of the big one."""
    yield EMBED.name, EMBED, True
    for i in range(big.layers):
        for part in layer:
            yield f"model.layers.{i}.{part.name}", part, i < small.layers
    yield NORM.name, NORM, True
    if not big.is_tied:
        yield HEAD.name, HEAD, True


class Padding:
    """Builds the large model's tensors from the small one's."""

    def __init__(self, small: Shape, big: Shape, dtype: torch.dtype, seed: int = 0) -> None:
        self.small, self.big, self.dtype = small, big, dtype
        doublings = (big.hidden // small.hidden).bit_length() - 1
        self.copies = 1 + doublings % 2  # r
        self.eps_factor = self.copies * small.hidden / big.hidden
        self.norm_factor = math.sqrt(self.eps_factor) / self.copies
        self.before, self.after = _axes(small), _axes(big)
        generator = torch.Generator().manual_seed(seed)
        self.pool = (torch.randn(POOL_SIZE, generator=generator) * RANDOM_STD).to(dtype)

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of the weights."""
        return self.big.parameters * self.dtype.itemsize

    def shape(self, part: Part) -> list[int]:
        """Shape of a part of the big model."""
        return [self.after[axis] for axis in part.axes]

    def grow(self, name: str, part: Part, weight: Tensor | None) -> Tensor:
        """The big model's tensor; `weight` is the small one's, None in a new layer."""
        factor = self.norm_factor if part.is_norm and part.axes == ("hidden",) else 1.0
        if part.is_norm:
            out = torch.full(self.shape(part), factor, dtype=self.dtype)
        elif part.writes_residual:
            out = torch.zeros(self.shape(part), dtype=self.dtype)
        else:
            out = self._random(name, self.shape(part))
        if weight is None:
            return out
        expected = [self.before[axis] for axis in part.axes]
        if list(weight.shape) != expected:
            raise ModelError(
                f"{name} has the shape {list(weight.shape)}, but config.json says {expected}"
            )
        self._place(out, part, (weight * factor if part.is_norm else weight).to(self.dtype))
        return out

    def _place(self, out: Tensor, part: Part, weight: Tensor) -> None:
        for row in self.places(part.axes[0]):
            if len(part.axes) == 1:
                out[row] = weight
                continue
            for column in self.places(part.axes[1]):
                out[row[:, None], column] = weight

    def places(self, axis: str) -> list[Tensor]:
        """For each copy, the new indices of the small model's axis."""
        own = torch.arange(self.before[axis])
        if axis == "hidden":
            return [own + copy * len(own) for copy in range(self.copies)]
        if axis != "q":
            return [own]
        before, after = (x.heads // x.kv_heads for x in (self.small, self.big))
        head, lane = own // self.small.head_dim, own % self.small.head_dim
        moved = head // before * after + head % before  # [H h]: same key-value head
        return [moved * self.small.head_dim + lane]

    def _random(self, name: str, shape: list[int]) -> Tensor:
        """Random weights: the repeated pool, from an offset that depends on the name."""
        key = hashlib.sha256(name.encode()).digest()
        place, total = int.from_bytes(key[:7], "big") % POOL_SIZE, math.prod(shape)
        pieces = [self.pool[place:]] + [self.pool] * (total // POOL_SIZE + 1)
        return torch.cat(pieces)[:total].view(shape)


def _axes(shape: Shape) -> dict[str, int]:
    return {
        "hidden": shape.hidden,
        "inner": shape.inner,
        "q": shape.heads * shape.head_dim,
        "kv": shape.kv_heads * shape.head_dim,
        "vocab": shape.vocab,
        "head": shape.head_dim,
    }
