"""Passes over few rows on a GPU, as CUDA graphs."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from forerun.gpu.layout import MOST_OWN, power_of_two

if TYPE_CHECKING:
    from forerun.models.transformer import DecoderConfig


def lacking(config: DecoderConfig) -> str:
    """Why no graph can run this decoder; empty if one can."""
    if os.environ.get("FORERUN_NATIVE") == "off":
        return "switched off by FORERUN_NATIVE"
    if find_spec("triton") is None:
        return "triton is not installed"
    if config.moe is not None:
        return "experts, which are chosen on the host"
    if config.head_dim != power_of_two(config.head_dim) or config.head_dim < 16:
        return f"a head size of {config.head_dim}, no power of two from 16 on"
    narrow = [window for window in config.windows if window is not None and window < MOST_OWN]
    if narrow:
        return f"a window of {narrow[0]}, below {MOST_OWN}"
    return ""
