"""The pieces of a decoder layer as plain callables without hooks or modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models import torchao
from forerun.runner.native.packing import Packed, can_pack
from forerun.runner.native.weight_format import UNQUANTIZED, WeightFormat

GELU_TANH = "gelu_tanh"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Linear:
    """y = x W^T + b: every product with weights.

    On a CPU the weights are packed: by our kernels if they are built, else (bf16) in oneDNN's
    blocked layout; `weight` is then None. A gated weight has gate rows, then up rows. On other
    devices rounded weights are torchao tensors.
    """

    __slots__ = (
        *("_blocked", "_nbytes", "bias", "device", "dtype", "is_quantized", "packed", "shape"),
        "weight",
    )

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
        pack: bool = True,
        rounding: WeightFormat = UNQUANTIZED,
    ) -> None:
        self.shape = tuple(weight.shape)  # [out, in]
        self._nbytes, self.dtype, self.device = weight.nbytes, weight.dtype, weight.device
        self.bias: Tensor | None = None
        self.weight: Tensor | None = weight
        self.packed: Packed | None = None
        self.is_quantized = False  # whether the weight is a torchao tensor
        self._blocked: Tensor | None = None
        if pack and can_pack(weight) and not (is_gated and weight.shape[0] % 32):
            self.packed, self.weight = Packed(weight, is_gated, rounding), None
        elif pack and can_block(weight):
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
            self.weight = None
        elif rounding != UNQUANTIZED and (weight.device.type == "cuda" or not pack):
            self.weight, self.is_quantized = torchao.quantized(weight, rounding), True
            self._nbytes = torchao.nbytes(self.weight)
        if bias is not None:
            self.set_bias(bias)

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias as stored."""
        if self.packed is not None:
            return self.packed.nbytes
        return self._nbytes + (0 if self.bias is None else self.bias.nbytes)

    def set_bias(self, bias: Tensor) -> None:
        """Sets the bias [out]."""
        self.bias = bias
        if self.packed is not None:
            self.packed.set_bias(bias)

    def replace(self, other: Linear) -> None:
        """Takes the weight of `other`, of the same shape; the bias stays."""
        assert self.shape == other.shape
        self.packed, self.weight, self._blocked = other.packed, other.weight, other._blocked
        if self.bias is not None:
            self.set_bias(self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            if self.packed.wins(len(x)) and not self.packed.is_gated:
                return self.packed.product(x)
            return F.linear(x, self.packed.unpack(), self.bias)
        if self._blocked is not None:
            return _linear_blocked(x, self._blocked, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]

    @property
    def can_look_up(self) -> bool:
        """Whether `rows` works and returns the exact weight."""
        is_rounded = self.is_quantized or (self.packed is not None and self.packed.is_rounded)
        return self._blocked is None and not is_rounded

    def rows(self, index: Tensor) -> Tensor:
        """Rows [n, in] of the weight."""
        if self.packed is not None:
            return self.packed.rows(index)
        return F.embedding(index, self.weight)  # type: ignore[arg-type]


def can_block(weight: Tensor) -> bool:
    """Whether oneDNN can store this weight in its blocked layout."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and HAS_BLOCKED


def _has_blocked() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return False


HAS_BLOCKED = _has_blocked()
if HAS_BLOCKED:
    _linear_blocked = torch.ops.mkldnn._linear_pointwise.default._op


class RMSNorm:
    """x / rms(x) * w, computed in fp32; `offset` 1 is gemma's (1 + w)."""

    __slots__ = ("_doubled", "_eps", "_fused", "eps", "nbytes", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        dtype, self.nbytes = weight.dtype, weight.nbytes
        self.weight = weight.float() + offset  # [d], fp32
        self.eps, self.shape = eps, tuple(weight.shape)
        self._eps = torch.tensor(eps, device=weight.device)
        # (x, -x) has mean 0 and variance mean(x^2): its layer_norm is RMSNorm in one kernel
        exact = dtype == torch.float32 or offset == 0.0
        doubled = self.weight.repeat(2).to(dtype) if exact else self.weight.repeat(2)
        self._doubled = doubled if weight.device.type == "cpu" else None
        self._fused = weight if weight.device.type != "cpu" and offset == 0.0 else None

    def __call__(self, x: Tensor) -> Tensor:
        d = self.shape[0]
        if self._doubled is not None and x.numel() == d:
            both = torch.cat((x, -x), -1)
            return torch.layer_norm(both, (2 * d,), self._doubled, None, self.eps).narrow(-1, 0, d)
        if self._fused is not None or x.dtype == torch.float32:
            weight = self.weight if self._fused is None else self._fused
            return F.rms_norm(x, self.shape, weight, self.eps)
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / d).rsqrt_()
        return wide.mul_(scale).mul_(self.weight).to(x.dtype)


class LayerNorm:
    """(x - mean) / std * w + b."""

    __slots__ = ("bias", "eps", "nbytes", "shape", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps, self.shape = weight, bias, eps, tuple(weight.shape)
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm


class GatedMLP:
    """down(act(gate x) * up x), gate and up in one product."""

    __slots__ = ("act", "down", "gate_up", "name", "width")

    def __init__(self, gate_up: Linear, down: Linear, act: str) -> None:
        self.gate_up, self.down, self.act, self.name = gate_up, down, ACTIVATIONS[act], act
        self.width = down.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        packed = self.gate_up.packed
        if packed is not None and packed.is_gated and packed.wins(len(x)):
            return self.down(packed.product(x, self.name))
        both = self.gate_up(x)  # [R, 2 width]
        inner = self.act(both.narrow(-1, 0, self.width))
        return self.down(inner.mul_(both.narrow(-1, self.width, self.width)))


class PlainMLP:
    """down(act(up x)), as in gpt2."""

    __slots__ = ("act", "down", "up")

    def __init__(self, up: Linear, down: Linear, act: str) -> None:
        self.up, self.down, self.act = up, down, ACTIVATIONS[act]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Experts:
    """Mixture of gated MLPs: the top k of softmax(gate x), optionally renormalised."""

    __slots__ = ("experts", "gate", "normalise", "top_k")

    def __init__(self, gate: Linear, experts: list[GatedMLP], top_k: int, normalise: bool) -> None:
        self.gate, self.experts = gate, experts
        self.top_k, self.normalise = top_k, normalise

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).float().softmax(-1).topk(self.top_k, dim=-1)  # [R, k]
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            row, rank = torch.where(chosen == expert)
            y = self.experts[expert](x[row]) * weights[row, rank, None]
            out.index_add_(0, row, y)
        return out
