"""Memory for KV cells, zeroed in parts, so that no step waits for all of it.

Virtual machines may provide fresh pages at less than 1 GB/s: 200 MB at once delay a step by 0.3 s.
"""

from __future__ import annotations

import math

import torch

from forerun.runner.native.memory import in_large_pages

STEP_BYTES = 1 << 23  # zeroed per step


class Cells:
    """Memory of [layers, slots, cells, 2, heads, size]; allocated by `ready`.

    Stored as [layers, slots, 2, heads, cells, size]. Initialised with zeros: masked values are
    multiplied by 0, and 0 times NaN is NaN.
    """

    @torch.inference_mode(mode=False)  # written within passes and between them
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.nbytes = tuple(shape), dtype, 0  # bytes that are ready
        size = math.prod(shape) * dtype.itemsize
        self._flat = torch.empty(size, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            in_large_pages(self._flat)

    def ready(self, share: float) -> None:
        """On a CPU: zeroes up to STEP_BYTES more, until `share` of all is ready."""
        goal = min(math.ceil(min(share, 1.0) * len(self._flat)), self.nbytes + STEP_BYTES)
        if goal > self.nbytes:  # in one thread, so that a large page is allocated once
            self._flat.numpy()[self.nbytes : goal] = 0
            self.nbytes = goal

    @torch.inference_mode(mode=False)
    def whole(self) -> torch.Tensor:
        """All cells, [layers, slots, cells, 2, heads, size], ready."""
        self._flat[self.nbytes :].zero_()
        self.nbytes = len(self._flat)
        layers, slots, cells, two, heads, size = self.shape
        stored = self._flat.view(self.dtype).view(layers, slots, two, heads, cells, size)
        return stored.permute(0, 1, 4, 2, 3, 5)
