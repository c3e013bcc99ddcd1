"""Detects changed weights: by counters at every pass, by content before cells are reused.

The counters of torch change with every in-place operation on a tensor, such as an optimizer step or
`load_state_dict`. They miss writes through `tensor.data` and switches that are no tensors, such as
a disabled adapter. `fingerprint` covers these; it reads all weights, about as much as one token.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per number
PLAIN = (bool, int, float, str, type(None))
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
IGNORED = {"training", "_is_hf_initialized"}  # attributes without effect on a pass in eval mode


def tensors_of(model: Any) -> Iterator[Tensor]:
    """Parameters and saved buffers; other buffers, such as rotary tables, follow the config."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter
        if module._buffers:
            unsaved = module._non_persistent_buffers_set
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in unsaved:
                    yield buffer


def counters(model: Any) -> Hashable:
    """Identity, address and in-place counter of every tensor."""
    return tuple(map(_counter, tensors_of(model)))


def _counter(tensor: Tensor) -> tuple[int, int, int]:
    version = 0 if tensor.is_inference() else tensor._version
    try:
        return id(tensor), tensor.data_ptr(), version
    except RuntimeError:  # a tensor subclass without storage
        return id(tensor), 0, version


@torch.no_grad()
def fingerprint(model: Any) -> Hashable:
    """Checksums of all tensors, and the plain attributes and hooks of all modules."""
    sums = tuple(map(_checksum, tensors_of(model)))
    return counters(model), sums, tuple(map(_switches, model.modules()))


def _checksum(tensor: Tensor) -> tuple[int, ...]:
    """A checksum of the bytes; () for opaque tensors. On a device: sums by row and by column."""
    if tensor.is_meta or not tensor.numel() or type(tensor.data) is not Tensor:
        return ()
    tensor = tensor.detach().contiguous()
    if tensor.is_cpu:
        return (zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data),)
    if not tensor.is_floating_point() and tensor.dtype not in INTS.values():
        tensor = tensor.to(torch.int64)
    bits = tensor.view(INTS[tensor.element_size()])
    flat = bits.reshape(1, -1) if bits.dim() < 2 else bits.flatten(1)
    rows, columns = flat.sum(1, dtype=torch.int64), flat.sum(0, dtype=torch.int64)
    return int(_weighted(rows)), int(_weighted(columns))


def _weighted(sums: Tensor) -> Tensor:
    """A sum that depends on the order, modulo 2^64."""
    places = torch.arange(1, len(sums) + 1, device=sums.device, dtype=torch.int64)
    return (sums * (places * 0x9E3779B97F4A7C1 + 1)).sum()


def _switches(module: Any) -> Hashable:
    """Plain attributes of a module, lists and dicts of them, and its hooks."""
    plain = tuple(
        (name, text)
        for name, value in vars(module).items()
        if name not in IGNORED and (text := _plain(value)) is not None
    )
    return id(module), plain, tuple(tuple(map(id, vars(module)[name].values())) for name in HOOKS)


def _plain(value: Any) -> str | None:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, list | tuple) and all(isinstance(v, PLAIN) for v in value):
        return repr(value)
    if isinstance(value, dict) and all(isinstance(v, PLAIN) for v in value.values()):
        return repr(value)
    return None
