"""Weights in the order in which the kernels read them; one copy, made at load.

[n, k] becomes blocks of 16 outputs: [blocks, k, 16], or [blocks, k / 2, 16, 2] for the bf16 pairs
of `vdpbf16ps`, padded with zeros to whole groups of 64 outputs. In a gated weight (gate rows, then
up rows) the blocks of the two halves alternate, so that a tile holds both sides of a product.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from forerun.native import Kernels, kernels
from forerun.native.layout import (
    ACTIVATIONS,
    BF16,
    BF16_PAIRS,
    F16,
    F32,
    GROUP,
    LANES,
    Linear,
)

HUGE = 1 << 21  # bytes of a large page
_madvise = getattr(ctypes.CDLL(None), "madvise", None)
KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}


def can_pack(weight: Tensor) -> bool:
    """Whether the kernels take this weight."""
    return weight.device.type == "cpu" and weight.dtype in KINDS and bool(kernels())


class Packed:
    """One packed weight [n, k]."""

    __slots__ = ("_bias", "_kernels", "data", "dtype", "is_gated", "record", "shape")

    def __init__(self, weight: Tensor, is_gated: bool = False) -> None:
        n, k = weight.shape
        half = n // 2
        if is_gated and n % (2 * LANES):
            raise ValueError(f"a gated weight needs a multiple of 32 rows, got {n}")
        self._kernels: Kernels = kernels()
        self.shape, self.dtype, self.is_gated = (n, k), weight.dtype, is_gated
        pairs = weight.dtype == torch.bfloat16 and self._kernels.level >= 3
        padded = weight.new_zeros(-(-n // GROUP) * GROUP, k + k % 2 if pairs else k)
        if is_gated:
            blocks = padded[:n, :k].view(half // LANES, 2, LANES, k)
            blocks[:, 0] = weight[:half].view(-1, LANES, k)
            blocks[:, 1] = weight[half:].view(-1, LANES, k)
        else:
            padded[:n, :k] = weight
        blocks = padded.view(len(padded) // LANES, LANES, -1, 2 if pairs else 1)
        self.data = _copied(blocks.transpose(1, 2))  # [blocks, k / 2, 16, 2] or [blocks, k, 16, 1]
        self._bias: Tensor | None = None
        kind = BF16_PAIRS if pairs else KINDS[weight.dtype]
        self.record = Linear(
            weight=self.data.data_ptr(),
            n=n,
            k=k,
            groups=len(padded) // GROUP,
            kind=kind,
            is_gated=is_gated,
        )

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def set_bias(self, bias: Tensor) -> None:
        """Adds a bias [n] to every output from now on."""
        padded = torch.zeros(self.record.groups * GROUP)
        padded[: len(bias)] = bias
        if self.is_gated:
            halves = bias.float().view(2, -1, LANES)
            padded[: len(bias)] = halves.transpose(0, 1).reshape(-1)
        self._bias, self.record.bias = padded, padded.data_ptr()

    def rows(self, index: Tensor) -> Tensor:
        """Rows [len(index), k] of the weight, unpacked; not of a gated one."""
        rows = self.data[index // LANES, :, index % LANES]
        return rows.flatten(1)[:, : self.shape[1]]

    def unpack(self) -> Tensor:
        """The weight [n, k] again."""
        n, k = self.shape
        rows = self.data.transpose(1, 2).flatten(0, 1).flatten(1)[:n, :k]
        if not self.is_gated:
            return rows.contiguous()
        return rows.view(-1, 2, LANES, k).transpose(0, 1).reshape(n, k)

    def product(self, x: Tensor, act: str = "silu") -> Tensor:
        """x [R, k] to [R, n]; of a gated weight, act(gate x) * up x [R, n / 2]. Same dtype as x."""
        n, k = self.shape
        inside = torch.bfloat16 if self.record.kind == BF16_PAIRS else torch.float32
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


def row_stride(k: int) -> int:
    """Numbers from one input row to the next: an odd count of cache lines, so that the rows of a
    tile do not fall into the same few places of the cache."""
    lines = -(-k // (2 * LANES))
    return (lines + 1 - lines % 2) * 2 * LANES


def _copied(source: Tensor) -> Tensor:
    """A contiguous copy, in large pages where the system gives them: fewer table walks per byte."""
    copy = torch.empty(source.shape, dtype=source.dtype)
    first = -(-copy.data_ptr() // HUGE) * HUGE
    last = (copy.data_ptr() + copy.nbytes) // HUGE * HUGE
    if last > first and _madvise is not None and hasattr(mmap, "MADV_HUGEPAGE"):
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)
    return copy.copy_(source)
