"""Packs weights in the order in which the kernels read them; one copy, made at load.

[n, k] becomes blocks of 16 outputs: [blocks, k, 16], or [blocks, k / 2, 16, 2] for the bf16 pairs
of `vdpbf16ps`, padded with zeros to whole groups of 64 outputs. In a gated weight (gate rows, then
up rows) the blocks of the two halves alternate, so that a tile holds both sides of a product.

With 8 bits a weight is an int8 times a scale per output, or per group of inputs of an output:
w ~ round(w / s) s with s = max|w| / 127. Products convert the integers to bf16 or float exactly, so
results are those of the rounded weight.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.runner.native import LEVELS, Kernels, kernels
from forerun.runner.native.layout import (
    ACTIVATIONS,
    BF16,
    BF16_PAIRS,
    F16,
    F32,
    GROUP,
    INT8,
    INT8_PAIRS,
    LANES,
    Linear,
)
from forerun.runner.native.memory import LARGE_PAGE, in_large_pages
from forerun.runner.native.weight_format import UNQUANTIZED, WeightFormat

CACHE_LINE_BYTES = 64  # bytes of a cache line
MAX_KERNEL_ROWS = 512  # above this torch's products with AVX-512 are faster, with unpacking
KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}


def can_pack(weight: Tensor) -> bool:
    """Whether the kernels support this weight."""
    return weight.device.type == "cpu" and weight.dtype in KINDS and bool(kernels())


class Packed:
    """One packed weight [n, k]."""

    __slots__ = ("_bias", "_kernels", "_scale", "data", "dtype", "is_gated", "record", "shape")

    def __init__(
        self, weight: Tensor, is_gated: bool = False, rounding: WeightFormat = UNQUANTIZED
    ) -> None:
        if weight.dim() != 2:
            raise ValueError(f"a weight is a matrix, got the shape {tuple(weight.shape)}")
        n, k = weight.shape
        if is_gated and n % (2 * LANES):
            raise ValueError(f"a gated weight needs a multiple of 32 rows, got {n}")
        self._kernels: Kernels = kernels()
        self.shape, self.dtype, self.is_gated = (n, k), weight.dtype, is_gated
        self._bias: Tensor | None = None
        self._scale: Tensor | None = None
        self.record = Linear(n=n, k=k, groups=-(-n // GROUP), is_gated=is_gated)
        if rounding.bits == 8:
            weight, scale = quantized_int8(weight, rounding.group_size)
            self.record.scaled, self.record.num_scales = rounding.group_size or k, scale.shape[1]
            self._scale = torch.stack([self._outputs(column) for column in scale.unbind(1)])
            self.record.scale = self._scale.data_ptr()
        is_wide = self._kernels.level >= 3  # bf16 pairs
        kinds = KINDS | {torch.int8: INT8_PAIRS if is_wide else INT8}
        if is_wide:
            kinds[torch.bfloat16] = BF16_PAIRS
        self.record.kind = kinds[weight.dtype]
        self.data = self._blocks(weight)
        self.record.weight = self.data.data_ptr()

    @property
    def is_rounded(self) -> bool:
        """Whether the weight has 8 bits."""
        return self._scale is not None

    @property
    def takes_bf16(self) -> bool:
        """Whether the kernels need inputs in bf16; otherwise float32."""
        return self.record.kind in (BF16_PAIRS, INT8_PAIRS)

    def _blocks(self, weight: Tensor) -> Tensor:
        """Packs the weight; types.h describes the three orders."""
        if self.record.kind == INT8_PAIRS:
            return self._quads(weight)
        n, dtype = self.shape[0], weight.dtype
        width = 2 if self.record.kind == BF16_PAIRS else 1
        if width == 2:
            weight = _as_pairs(weight)  # [n, k / 2]: a pair moves as one number
        groups = self.record.groups * GROUP // LANES
        packed = _taken((groups, weight.shape[1], LANES), weight.dtype)
        packed[-(-n // LANES) :] = 0
        if self.is_gated:
            halves = weight.view(2, -1, LANES, weight.shape[1]).transpose(2, 3)
            packed[: n // LANES].view(-1, 2, *packed.shape[1:])[:, 0] = halves[0]
            packed[: n // LANES].view(-1, 2, *packed.shape[1:])[:, 1] = halves[1]
        else:
            whole, rest = divmod(n, LANES)
            packed[:whole] = weight[: n - rest].view(whole, LANES, weight.shape[1]).transpose(1, 2)
            if rest:
                packed[whole] = 0
                packed[whole, :, :rest] = weight[n - rest :].T
        return packed.view(dtype).view(groups, -1, LANES, width)

    def _quads(self, weight: Tensor) -> Tensor:
        """int8 weights, packed in the order INT8_PAIRS: sign and magnitude."""
        n, k = self.shape
        padded = weight.new_zeros(self.record.groups * GROUP, -(-k // 4) * 4)
        if self.is_gated:
            blocks = padded[:n, :k].view(n // (2 * LANES), 2, LANES, k)
            blocks[:, 0] = weight[: n // 2].view(-1, LANES, k)
            blocks[:, 1] = weight[n // 2 :].view(-1, LANES, k)
        else:
            padded[:n, :k] = weight
        magnitudes = padded.abs().view(torch.uint8) | (padded < 0).to(torch.uint8) << 7
        quads = magnitudes.view(len(padded) // LANES, 4, 4, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return _taken(quads.shape, quads.dtype).copy_(quads)

    def _ordered(self) -> Tensor:
        """`data` as [n, k] again, halves of a gated weight alternating."""
        n, k = self.shape
        if self.record.kind == INT8_PAIRS:
            bytes_ = self.data.permute(0, 2, 4, 1, 3, 5).reshape(self.record.groups * GROUP, -1)
            signs = 1 - 2 * (bytes_ >> 7).to(torch.int8)
            return ((bytes_ & 127).to(torch.int8) * signs)[:n, :k]
        return self.data.transpose(1, 2).flatten(0, 1).flatten(1)[:n, :k]

    def _outputs(self, values: Tensor) -> Tensor:
        """One float32 value per output [n], in the order of the outputs, padded."""
        padded = torch.zeros(self.record.groups * GROUP)
        padded[: len(values)] = values
        if self.is_gated:
            halves = values.float().view(2, -1, LANES)
            padded[: len(values)] = halves.transpose(0, 1).reshape(-1)
        return padded

    @property
    def nbytes(self) -> int:
        others = [part for part in (self._bias, self._scale) if part is not None]
        return self.data.nbytes + sum(part.nbytes for part in others)

    def set_bias(self, bias: Tensor) -> None:
        """Adds a bias [n] to every output from now on."""
        self._bias = self._outputs(bias)
        self.record.bias = self._bias.data_ptr()

    def rows(self, index: Tensor) -> Tensor:
        """Rows [len(index), k] of the weight, unpacked; not of a gated or a rounded one."""
        rows = self.data[index // LANES, :, index % LANES]
        return rows.flatten(1)[:, : self.shape[1]]

    def unpack(self) -> Tensor:
        """The weight [n, k], unpacked, in its type; a rounded one stays rounded."""
        n, k = self.shape
        rows = self._ordered()
        if self._scale is not None:
            scale = self._scale.T[:n].repeat_interleave(self.record.scaled, dim=1)[:, :k]
            rows = (rows * scale).to(self.dtype)
        if not self.is_gated:
            return rows.contiguous()
        return rows.view(-1, 2, LANES, k).transpose(0, 1).reshape(n, k)

    def wins(self, rows: int) -> bool:
        """Whether a product of so many rows is faster here than unpacking and torch's product.

        Measured by benchmarks/many_rows.py.
        """
        return rows <= MAX_KERNEL_ROWS or self._kernels.level == LEVELS.index("avx2")

    def product(self, x: Tensor, act: str = "silu") -> Tensor:
        """x [R, k] to [R, n]; of a gated weight, act(gate x) * up x [R, n / 2]. Same dtype as x.

        Any strides; raises ValueError for another width.
        """
        n, k = self.shape
        if x.dim() != 2 or x.shape[1] != k:
            raise ValueError(
                f"expected rows of {k} numbers for a weight {self.shape}, got the shape "
                f"{tuple(x.shape)}"
            )
        inside = torch.bfloat16 if self.takes_bf16 else torch.float32
        source = torch.zeros(len(x), row_stride(k), dtype=inside)
        source[:, :k] = x
        rows, width = len(x), -(-n // LANES) * LANES
        out = torch.empty(rows, width // 2 if self.is_gated else width)
        self._kernels.library.forerun_product(  # type: ignore[union-attr]
            self._kernels.level,
            ctypes.byref(self.record),
            source.data_ptr(),
            source.shape[1],
            rows,
            out.data_ptr(),
            out.shape[1],
            out.data_ptr(),
            F32,
            ACTIVATIONS.index(act),
            torch.get_num_threads(),
        )
        return out[:, : n // 2 if self.is_gated else n].to(x.dtype)


def quantized_int8(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """int8 [n, k] and float32 scales [n, ceil(k / group_size)]; their product is near `weight`."""
    n, k = weight.shape
    pieces = weight.float().split(group_size or k, dim=1)
    found, scales = [], []
    for piece in pieces:
        scale = piece.abs().amax(1, keepdim=True) / 127
        found.append((piece / scale.clamp(min=1e-30)).round_().to(torch.int8))
        scales.append(scale)
    return torch.cat(found, 1), torch.cat(scales, 1)


def row_stride(k: int) -> int:
    """Stride of input rows: an odd number of cache lines, which avoids cache conflicts."""
    lines = -(-k // (2 * LANES))
    return (lines + 1 - lines % 2) * 2 * LANES


def _as_pairs(weight: Tensor) -> Tensor:
    """A bf16 weight [n, k] as [n, k / 2] int32; an odd k gets a column of zeros."""
    if weight.shape[1] % 2:
        weight = torch.nn.functional.pad(weight, (0, 1))
    if not weight.is_contiguous() or weight.storage_offset() % 2:
        weight = weight.clone(memory_format=torch.contiguous_format)
    return weight.view(torch.int32)


def _taken(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory of the arena in this shape."""
    return ARENA.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class Arena:
    """Memory for weights in large pages, if the system provides them (fewer TLB misses).

    Weights are contiguous, because one of a few megabytes fills few whole pages. A block is freed
    with its last weight; unwritten parts take no memory.
    """

    def __init__(self, block: int = 64 * LARGE_PAGE) -> None:
        self._block, self._lock = block, threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8 [size], aligned to a cache line."""
        with self._lock:
            if len(self._free) < size:
                self._free = _in_large_pages(max(self._block, -(-size // LARGE_PAGE) * LARGE_PAGE))
            taken = self._free[:size]
            self._free = self._free[-(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES :]
        return taken


def _in_large_pages(size: int) -> Tensor:
    """uint8 [size], aligned to a large page; size: a multiple of a large page."""
    memory = torch.empty(size + LARGE_PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % LARGE_PAGE :][:size]
    in_large_pages(memory)
    return memory


ARENA = Arena()
