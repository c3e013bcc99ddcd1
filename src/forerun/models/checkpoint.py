"""Reads safetensors folders and GGUF files tensor by tensor into the decoder's fused parts.

Shards are memory-mapped. Every part is filled in its final dtype, and packed as soon as it is
complete, so memory never holds a second copy of the model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.families import Plan, Unsupported
from forerun.models.gguf import GgufFile
from forerun.models.gguf_folder import linked_file
from forerun.models.gguf_names import hf_tensors
from forerun.models.layers import Experts, GatedMLP, LayerNorm, Linear, PlainMLP, RMSNorm
from forerun.models.padding import in_lanes, widened
from forerun.models.paths import GGUF
from forerun.models.transformer import DecoderConfig, Layer, Transformer
from forerun.models.weight_map import IGNORED, canonical, missing_message, norm_names, shapes
from forerun.runner.free_memory import check_weights
from forerun.runner.native.packing import can_pack
from forerun.runner.native.weight_format import UNQUANTIZED, WeightFormat

MAX_HEADER_BYTES = 100 << 20  # limit of the safetensors format


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, or its GGUF file. Raises Unsupported without any."""
    if linked := linked_file(folder):
        return [linked]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise ModelError(f"{index} is not a safetensors index: {cause}") from cause
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ModelError(
                f"{index.name} names {missing[0]}, which is not in {folder}; copy it there"
            )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    raise Unsupported("there is no model.safetensors")


def tensors(files: list[Path], dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the shards. Raises ModelError for a file that cannot be read.

    dtype: for dequantised GGUF weights; safetensors keep their stored dtype.
    """
    for path in files:
        if path.suffix.lower() == GGUF:
            yield from hf_tensors(GgufFile(path), dtype)
            continue
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a dict
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as cause:
            if not os.access(path, os.R_OK):
                raise ModelError(f"{path} may not be read; check its permissions") from cause
            raise ModelError(f"{path} {_damage(path, cause)}; fetch or copy it again") from cause


def _damage(path: Path, cause: Exception) -> str:
    """What is wrong with a safetensors file: 8-byte header length, JSON header, data."""
    unknown = f"is not a readable safetensors file ({cause})"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                return unknown
            header = json.loads(file.read(length)) if 8 + length <= size else {}
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return unknown
    if whole == size:
        return unknown
    return f"has {size:,} bytes where its header tells of {whole:,}{' or more' * (not ends)}"


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


def _file_of(name: str, files: list[Path]) -> Path:
    """The shard that contains a tensor."""
    for path in files:
        if path.suffix.lower() == GGUF:
            return path
        with safe_open(path, framework="pt") as shard:
            if name in shard.keys():  # noqa: SIM118 - not a dict
                return path
    raise KeyError(name)


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
    for name, tensor in tensors(files, dtype):
        if canonical(name) in plan.pieces and (found := flaw(tensor, dtype)):
            raise ModelError(f"tensor {name} in {_file_of(name, files)} {found}")
        parts.add(name, tensor)
    parts.check()
    return parts.build()


def check_memory(config: DecoderConfig, itemsize: float, device: torch.device) -> None:
    """Raises CapacityError if the weights do not fit into free memory; warns if they barely fit."""
    size = sum(math.prod(shape) for shape in shapes(config).values()) * itemsize
    check_weights(round(size), device, f"at {itemsize:g} bytes each")


class Parts:
    """The decoder's parts during loading; parts for our kernels are padded to whole lanes."""

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
        self._missing = dict.fromkeys(plan.pieces)  # ordered set of names
        self._done: dict[str, Tensor | Linear] = {}
        self._spare_head: Tensor | None = None  # lm_head.weight of a tied checkpoint

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies one checkpoint tensor into its part. Raises Unsupported for an unknown name."""
        short = canonical(name)
        piece = self.plan.pieces.get(short)
        if piece is None:
            if short == "lm_head.weight":
                self._spare_head = tensor
            elif not short.endswith(IGNORED):
                raise Unsupported(f"unknown tensor {name}")
            return
        tensor = tensor if piece.fix is None else piece.fix(tensor)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise Unsupported(f"{name} is stored as {tensor.dtype}")
        shape = self.plan.shapes[piece.dest]
        stop = piece.row + tensor.shape[0]
        if tensor.shape[1:] != shape[1:] or stop > shape[0]:
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, which does not fit the config "
                f"({list(shape)} for the whole of {piece.dest}); is config.json of this checkpoint?"
            )
        if tensor.shape == shape and self._is_copied_by_packing(piece.dest):
            self._buffers[piece.dest] = tensor.to(self.dtype)
        else:
            if piece.dest not in self._buffers:
                self._buffers[piece.dest] = torch.empty(shape, dtype=self.dtype)
            self._buffers[piece.dest][piece.row : stop] = tensor
        self._missing.pop(short, None)
        self._left[piece.dest] -= tensor.shape[0]
        if self._left[piece.dest] == 0:
            self._finish(piece.dest)

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
        unfilled = [dest for dest, left in self._left.items() if left]
        if unfilled:
            raise ModelError(f"the tensors of {unfilled[0]} are smaller than config.json says")
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
        return Transformer(c, embed, layers, norm, head, done.get("positions"))  # type: ignore[arg-type]

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
