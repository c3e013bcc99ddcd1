"""Copies from the host to a device that do not wait for the work that the device still has."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def staged(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The array as a host tensor from which a copy to the device does not block.

    CUDA copies pageable memory only after all earlier work of the stream, and the host waits for
    it. torch keeps pinned memory until the copy is done, so the result may be dropped at once.
    """
    found = torch.as_tensor(array)
    return found.pin_memory() if device.type == "cuda" else found


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The array on the device; the host does not wait. On the CPU it shares memory."""
    return staged(array, device).to(device, non_blocking=device.type in ("cuda", "meta"))
