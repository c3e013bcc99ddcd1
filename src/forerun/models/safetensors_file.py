"""Writes a safetensors file tensor by tensor: memory holds one at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

ALIGN = 8  # bytes; the data begins at a multiple


def write(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    report: Callable[[int], None] = lambda done: None,
) -> None:
    """Writes bf16 tensors in the order of `shapes`, their names and shapes.

    report: called with bytes written. Raises ValueError for a tensor out of order.
    """
    names, done = list(shapes), 0
    with path.open("wb") as file:
        file.write(_header(shapes))
        for name, tensor in tensors:
            expected = names.pop(0)
            if (name, tuple(tensor.shape)) != (expected, shapes[expected]):
                raise ValueError(f"expected {expected} {shapes[expected]}, got {name}")
            raw = tensor.to(torch.bfloat16).contiguous().view(-1).view(torch.uint8)
            file.write(raw.numpy().data)
            report(done := done + raw.numel())
        if names:
            raise ValueError(f"{names[0]} is missing")
        file.flush()
        os.fsync(file.fileno())


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The 8-byte length of the JSON header, and the header padded with spaces."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    return len(text).to_bytes(8, "little") + text
