"""Forward passes over few rows as CUDA graphs: which GPUs and models support them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from forerun.errors import install_extra

if TYPE_CHECKING:  # `forerun doctor` imports this before torch
    import torch

    from forerun.models.transformer import DecoderConfig

MAX_HEAD_DIM = 128  # larger heads need more shared memory than most GPUs have
MIN_CAPABILITY = (8, 0)  # compute capability that the kernels need
TURNED_OFF = "CUDA graphs are turned off"  # by the option `graphs`


def unavailable(device: torch.device) -> str:
    """Why CUDA graphs cannot run on a device; empty if they can."""
    import torch

    if find_spec("triton") is None:
        return f"triton is not installed; {install_extra('cuda')}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    return ""


def unsupported_config(config: DecoderConfig) -> str:
    """Why CUDA graphs cannot run a decoder; empty if they can."""
    from forerun.runner.gpu.layout import MAX_OWN_CELLS, power_of_two

    if config.moe is not None:
        return "experts, which are chosen on the host"
    if not config.has_even_heads or config.layer_mlp_sizes:
        return "sizes that differ between layers"
    dim = config.head_dim
    if dim != power_of_two(dim) or not 16 <= dim <= MAX_HEAD_DIM:
        return f"a head size of {dim}, no power of two from 16 to {MAX_HEAD_DIM}"
    narrow = [window for window in config.windows if window is not None and window < MAX_OWN_CELLS]
    if narrow:
        return f"a window of {narrow[0]}, below {MAX_OWN_CELLS}"
    return ""
