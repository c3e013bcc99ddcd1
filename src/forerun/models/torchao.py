"""Weights in 8 or 4 bits on a GPU, stored and multiplied by torchao.

int8 and fp8 have one scale per output, int4 one per group of inputs. Products are computed in the
model's dtype: 8-bit weights are converted first, which saves memory but no time; 4-bit weights have
a kernel. torchao is imported only when such weights are requested.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError, install_extra
from forerun.runner.native.weight_format import INT4_GROUP_SIZES, WeightFormat

MIN_RELEASE = 0, 18  # of torchao: the first with the configs below


def why_not(rounding: WeightFormat, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """Why a device does not support a rounding, with an alternative; empty if it does."""
    if device.type != "cuda":
        if rounding.has_cpu_kernel:
            return "int8 needs a CPU or CUDA; use auto"
        return "fp8 and int4 need CUDA; use int8 on a CPU, or auto"
    if find_spec("torchao") is None:
        return f"on a GPU they need torchao; {install_extra('quant')}, or use auto"
    if (found := _release(version("torchao"))) < MIN_RELEASE:
        return (
            f"they need torchao {_dotted(MIN_RELEASE)} or later, not {_dotted(found)}; "
            f"{install_extra('quant')}, or use auto"
        )
    if rounding.bits == 8 and rounding.group_size:
        return "int8 with a scale per group of inputs is for CPUs; use int8"
    if rounding.bits == 4 and dtype not in (None, torch.bfloat16):
        return f"int4 is for bf16 models, and this one is in {dtype}; use dtype 'bf16'"
    if rounding.bits == 4 and torch.cuda.get_device_capability(device) < (8, 0):
        return f"int4 needs Ampere or later, not {torch.cuda.get_device_name(device)}; use int8"
    return ""


def quantized(weight: Tensor, rounding: WeightFormat) -> Tensor:
    """The weight [out, in] as a torchao tensor for `F.linear`.

    Raises ConfigError if the input width is no multiple of int4's group size.
    """
    out, inner = weight.shape
    if rounding.bits == 4 and inner % rounding.group_size:
        fitting = [f"int4:{size}" for size in INT4_GROUP_SIZES if inner % size == 0]
        raise ConfigError(
            f"int4:{rounding.group_size} needs input widths that are multiples of "
            f"{rounding.group_size}, and one is {inner}; use {' or '.join([*fitting[-1:], 'int8'])}"
        )
    from torchao.quantization import quantize_

    holder = torch.nn.Linear(inner, out, bias=False, device="meta")
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(holder, _config(rounding))
    return holder.weight.data


def nbytes(weight: Tensor) -> int:
    """Bytes of a torchao tensor."""
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(getattr(weight, name).nbytes for name in names)


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version, such as 0.18.0+cu128 or 0.18rc1."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _config(rounding: WeightFormat) -> Any:
    """torchao's config for a rounding; compiler settings stay unchanged."""
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
    )

    how: dict[str, Any] = {"set_inductor_config": False}
    if rounding.bits == 4:
        # the packing of torch's kernel; others need further packages
        packing = "tile_packed_to_4d"
        return Int4WeightOnlyConfig(
            group_size=rounding.group_size, int4_packing_format=packing, **how
        )
    if rounding.is_float:
        return Float8WeightOnlyConfig(**how)
    return Int8WeightOnlyConfig(version=2, **how)
