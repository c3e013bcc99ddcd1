"""Reads safetensors folders and GGUF files tensor by tensor into the decoder's fused parts.

Shards are memory-mapped. Every part is filled in its final dtype, and packed as soon as it is
complete, so memory never holds a second copy of the model.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError, ModelError
from forerun.models.families import Plan, Unsupported
from forerun.models.layers import Experts, GatedMLP, LayerNorm, Linear, PlainMLP, RMSNorm
from forerun.models.one_thread import for_each
from forerun.models.padding import in_lanes, widened
from forerun.models.shards import file_of, shard_files, tensors
from forerun.models.transformer import DecoderConfig, Layer, Transformer
from forerun.models.vocab_map import VocabMap
from forerun.models.weight_map import IGNORED, canonical, missing_message, norm_names, shapes
from forerun.runner.free_memory import check_weights
from forerun.runner.native.packing import can_pack
from forerun.runner.native.weight_format import UNQUANTIZED, WeightFormat

HEAD_MAP = "d2t", "t2d"  # tensors of a reduced head: id - row of each row; which ids have a row
__all__ = ["Parts", "flaw", "load_decoder", "shard_files", "stored_dtype", "tensors"]


def flaw(tensor: Tensor, dtype: torch.dtype) -> str:
    """A message if a weight has NaN or infinite values, or would overflow in `dtype`; else "".

    One-byte dtypes are not checked.
    """
    is_wide = tensor.is_floating_point() and tensor.element_size() > 1
    if not is_wide or not tensor.numel() or tensor.is_meta:
        return ""
    low, high = (float(edge) for edge in torch.aminmax(tensor))  # NaN propagates
    if not math.isfinite(low) or not math.isfinite(high):
        bad = int((~tensor.isfinite()).sum())
        is_half = tensor.dtype == torch.float16
        cause = (
            " or too large for fp16; load the model with dtype bf16 or fp32, or" if is_half else ";"
        )
        return (
            f"holds {bad:,} values of {tensor.numel():,} that are NaN or infinite: these weights "
            f"are damaged{cause} fetch or copy them again"
        )
    largest = max(-low, high)
    if math.isinf(torch.tensor(largest).to(dtype).item()):
        return (
            f"reaches {largest:.3g}, and {dtype} ends at {torch.finfo(dtype).max:.3g}; load the "
            "model with dtype bf16 or fp32"
        )
    return ""


def stored_dtype(files: list[Path]) -> torch.dtype:
    """The dtype of the first floating tensor of a checkpoint."""
    for _, tensor in tensors(files):
        if tensor.is_floating_point():
            return tensor.dtype
    return torch.float32


def load_decoder(
    plan: Plan,
    files: list[Path],
    dtype: torch.dtype,
    device: torch.device,
    rounding: WeightFormat = UNQUANTIZED,
) -> Transformer:
    """The decoder of a checkpoint. Raises ModelError for missing tensors or wrong shapes.

    Raises CapacityError if the weights do not fit into memory.
    """
    parts = Parts(plan, dtype, device, rounding)
    itemsize = dtype.itemsize if rounding == UNQUANTIZED else rounding.bits / 8
    check_memory(parts.config, itemsize, device)
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    for_each(tensors(files, dtype), partial(_add, parts, files), workers)
    parts.check()
    return parts.build()


def _add(parts: Parts, files: list[Path], item: tuple[str, Tensor]) -> None:
    """Checks one tensor of the files and adds it. Raises ModelError for a damaged tensor."""
    name, tensor = item
    if canonical(name) in parts.plan.pieces and (found := flaw(tensor, parts.dtype)):
        raise ModelError(f"tensor {name} in {file_of(name, files)} {found}")
    parts.add(name, tensor)


def tensor_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The shape of every checkpoint tensor, after `Piece.fix`: its rows of its part."""
    starts: dict[str, list[tuple[int, str]]] = {}
    for name, piece in plan.pieces.items():
        starts.setdefault(piece.dest, []).append((piece.row, name))
    found: dict[str, tuple[int, ...]] = {}
    for dest, rows in starts.items():
        shape, rows = plan.shapes[dest], sorted(rows)
        stops = [row for row, _ in rows[1:]] + [shape[0]]
        for (row, name), stop in zip(rows, stops, strict=True):
            found[name] = (stop - row, *shape[1:])
    return found


def check_memory(config: DecoderConfig, itemsize: float, device: torch.device) -> None:
    """Raises CapacityError if the weights do not fit into free memory; warns if they barely fit."""
    size = sum(math.prod(shape) for shape in shapes(config).values()) * itemsize
    check_weights(round(size), device, f"at {itemsize:g} bytes each")


class Parts:
    """The decoder's parts during loading; parts for our kernels are padded to whole lanes.

    Several threads may add tensors.
    """

    def __init__(
        self,
        plan: Plan,
        dtype: torch.dtype,
        device: torch.device,
        rounding: WeightFormat = UNQUANTIZED,
    ) -> None:
        self.plan, self.dtype, self.device, self.rounding = plan, dtype, device, rounding
        self._packs = can_pack(torch.empty(0, dtype=dtype, device=device))
        self.config = in_lanes(plan.config) if self._packs else plan.config  # of the built decoder
        self._buffers: dict[str, Tensor] = {}
        self._left = {dest: shape[0] for dest, shape in plan.shapes.items()}
        self._wanted = tensor_shapes(plan)
        self._missing = dict.fromkeys(plan.pieces)  # ordered set of names
        self._done: dict[str, Tensor | Linear] = {}
        self._lock = Lock()  # of buffers and counts
        self._spare_head: Tensor | None = None  # lm_head.weight of a tied checkpoint
        self._head_map: VocabMap | None = None  # of a reduced head

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies one checkpoint tensor into its part. Raises Unsupported for an unknown name."""
        short = canonical(name)
        piece = self.plan.pieces.get(short)
        if piece is None:
            if self.config.head_size and short in HEAD_MAP:
                self._read_head_map(short, tensor)
            elif short == "lm_head.weight":
                self._spare_head = tensor
            elif not short.endswith(IGNORED):
                raise Unsupported(f"unknown tensor {name}")
            return
        stored = tuple(tensor.shape)
        tensor = tensor if piece.fix is None else piece.fix(tensor)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise Unsupported(f"{name} is stored as {tensor.dtype}")
        if tuple(tensor.shape) != self._wanted[short]:
            wanted = self._wanted[short]
            wanted = wanted if tuple(tensor.shape) == stored else wanted[::-1]  # transposed
            raise ModelError(
                f"tensor {name} has shape {list(stored)}, and config.json makes it {list(wanted)}; "
                "is config.json of this checkpoint?"
            )
        dest, rows = piece.dest, tensor.shape[0]
        if tensor.shape == self.plan.shapes[dest] and self._is_copied_by_packing(dest):
            self._buffers[dest] = tensor.to(self.dtype)
        else:
            self._buffer(dest)[piece.row : piece.row + rows] = tensor
        with self._lock:
            self._missing.pop(short, None)
            self._left[dest] -= rows
            is_complete = self._left[dest] == 0
        if is_complete:
            self._finish(dest)

    def _read_head_map(self, name: str, tensor: Tensor) -> None:
        """Reads d2t of a reduced head; t2d says the same."""
        if name != HEAD_MAP[0]:
            return
        c = self.config
        if tuple(tensor.shape) != (c.head_size,):
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, and config.json makes it "
                f"[{c.head_size}]; is config.json of this checkpoint?"
            )
        try:
            self._head_map = VocabMap.from_offsets(tensor.numpy(), c.vocab_size)
        except ConfigError as error:
            raise ModelError(f"tensor {name} cannot be used: {error}") from None

    def _buffer(self, dest: str) -> Tensor:
        """The memory in which a part is put together."""
        with self._lock:
            if dest not in self._buffers:
                self._buffers[dest] = torch.empty(self.plan.shapes[dest], dtype=self.dtype)
            return self._buffers[dest]

    def _is_copied_by_packing(self, dest: str) -> bool:
        """Whether packing copies this part, so it needs no copy from the file before."""
        is_lookup = self.plan.config.is_tied and self.rounding == UNQUANTIZED and dest == "embed"
        return self._packs and (
            is_lookup or dest.endswith(".weight") and len(self.plan.shapes[dest]) == 2
        )

    def check(self) -> None:
        """Raises ModelError for missing tensors, Unsupported if a tied head differs."""
        if self._missing:
            raise ModelError(missing_message(list(self._missing)))
        if self.config.head_size and self._head_map is None:
            raise ModelError(missing_message([HEAD_MAP[0]]))
        spare = self._spare_head
        if spare is not None and not torch.equal(
            spare.to(self.dtype),
            self._done["embed"].cpu(),  # type: ignore[union-attr]
        ):
            raise Unsupported("the config ties the head to the embedding, but the two differ")

    def take(self, dest: str) -> Tensor | Linear:
        """Removes and returns a finished part."""
        return self._done.pop(dest)

    def build(self) -> Transformer:
        """The decoder made of the finished parts."""
        c, done = self.config, self._done
        embed: Tensor | Linear | None = done["embed"]
        assert isinstance(embed, Tensor)
        if c.is_tied:
            head = Linear(embed, rounding=self.rounding_of("head"))
            if head.can_look_up:  # the head serves as embedding table
                embed = None
        else:
            head = self._linear("head")
        layers = [self._layer(i) for i in range(c.num_layers)]
        norm = self._norm("norm")
        places: Any = done.get("positions")
        return Transformer(c, embed, layers, norm, head, places, self._head_map)

    def _finish(self, dest: str) -> None:
        tensor = widened(dest, self._buffers.pop(dest), self.plan.config, self.config)
        tensor = tensor.to(self.device)
        is_linear = dest.endswith(".weight") and tensor.dim() == 2
        is_gated = dest.endswith("gate_up.weight")
        rounding = self.rounding_of(dest)
        self._done[dest] = (
            Linear(tensor, is_gated=is_gated, rounding=rounding) if is_linear else tensor
        )

    def rounding_of(self, dest: str) -> WeightFormat:
        """The rounding of a part: none for routers, and none for heads with 4 bits."""
        is_fine = dest.endswith("router.weight") or (
            self.rounding.bits == 4 and dest.startswith("head")
        )
        return UNQUANTIZED if is_fine else self.rounding

    def _linear(self, name: str) -> Linear:
        linear = self._done[f"{name}.weight"]
        assert isinstance(linear, Linear)
        bias = self._done.get(f"{name}.bias")
        if isinstance(bias, Tensor):
            linear.set_bias(bias)
        return linear

    def _norm(self, name: str, share: float = 1.0) -> RMSNorm | LayerNorm:
        """share: of the normalised numbers, without padding."""
        c = self.config
        weight, bias = self._done[f"{name}.weight"], self._done.get(f"{name}.bias")
        if c.norm == "layer":
            return LayerNorm(weight, bias, c.norm_eps)  # type: ignore[arg-type]
        return RMSNorm(weight, c.norm_eps * share, c.norm_offset)  # type: ignore[arg-type]

    def _layer(self, i: int) -> Layer:
        c, at = self.config, f"layers.{i}"
        norms = {name: self._norm(f"{at}.{name}") for name in norm_names(c)}
        if c.qk_norm:
            share = self.plan.config.head_dim / c.head_dim
            norms |= {name: self._norm(f"{at}.{name}", share) for name in ("q_norm", "k_norm")}
        qkv, out = self._linear(f"{at}.qkv"), self._linear(f"{at}.out")
        return Layer(qkv, out, self._mlp(c, at, i), **norms)  # type: ignore[arg-type]

    def _mlp(self, c: DecoderConfig, at: str, i: int) -> GatedMLP | PlainMLP | Experts:
        if c.moe and c.moe.layers[i]:
            experts = [self._gated(f"{at}.experts.{e}") for e in range(c.moe.num_experts)]
            gate = self._linear(f"{at}.router")
            return Experts(gate, experts, c.moe.top_k, c.moe.normalise)
        if c.is_gated:
            return self._gated(at)
        return PlainMLP(self._linear(f"{at}.up"), self._linear(f"{at}.down"), c.act)

    def _gated(self, at: str) -> GatedMLP:
        linears = self._linear(f"{at}.gate_up"), self._linear(f"{at}.down")
        return GatedMLP(*linears, self.config.act)
