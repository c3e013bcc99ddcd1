"""Passes over few rows on a GPU, as CUDA graphs.

FORERUN_GRAPHS=on asks for them: they are off until they have been measured as they are now.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from forerun.gpu.layout import MOST_OWN, power_of_two

if TYPE_CHECKING:
    from forerun.models.transformer import DecoderConfig

MOST_DIM = 128  # larger heads take more shared memory than most GPUs have
OLDEST = (8, 0)  # compute capability: what the kernels compile for


def why_not(device: torch.device) -> str:
    """Why passes on a GPU are not recorded, whatever the model; empty if they are."""
    if os.environ.get("FORERUN_GRAPHS") != "on":
        return "FORERUN_GRAPHS is not on"
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    return ""


def lacking(config: DecoderConfig) -> str:
    """Why no graph can run this decoder; empty if one can."""
    if config.moe is not None:
        return "experts, which are chosen on the host"
    if config.head_dim != power_of_two(config.head_dim) or not 16 <= config.head_dim <= MOST_DIM:
        return f"a head size of {config.head_dim}, no power of two from 16 to {MOST_DIM}"
    narrow = [window for window in config.windows if window is not None and window < MOST_OWN]
    if narrow:
        return f"a window of {narrow[0]}, below {MOST_OWN}"
    return ""
