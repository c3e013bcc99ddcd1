"""Detects a changed model: by counters at every pass, by content before cells are reused.

The counters of torch change with every in-place operation on a tensor, such as an optimizer step or
`load_state_dict`. They miss writes through `tensor.data` and switches that are no tensors, such as
a disabled adapter. `fingerprint` covers these; it reads all weights, about as much as one token.
It does not see what code reads from global variables or from objects of other classes.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per number
PLAIN = (bool, int, float, str, type(None))
CODE = (FunctionType, BuiltinFunctionType, type)
# attributes without effect on a pass in eval mode, or seen as tensors
IGNORED = {"training", "_is_hf_initialized", "_parameters", "_buffers", "_modules"}
MAX_DEPTH = 6  # of functions and containers within each other


def tensors_of(model: Any, *, unsaved: bool = False) -> Iterator[Tensor]:
    """Parameters and saved buffers. unsaved: also the other buffers, such as rotary tables."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter
        if module._buffers:
            skipped = () if unsaved else module._non_persistent_buffers_set
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in skipped:
                    yield buffer


def counters(model: Any) -> Hashable:
    """Identity, address and in-place counter of every tensor; identity of every module's code."""
    return tuple(map(_counter, tensors_of(model))), tuple(map(_code, model.modules()))


def _counter(tensor: Tensor) -> tuple[int, int, int]:
    version = 0 if tensor.is_inference() else tensor._version
    try:
        return id(tensor), tensor.data_ptr(), version
    except RuntimeError:  # a tensor subclass without storage
        return id(tensor), 0, version


def _code(module: Any) -> tuple[int, int, int]:
    """The module, and the function that runs it."""
    own = vars(module).get("forward")
    return id(module), id(own), id(type(module).forward)


@torch.no_grad()
def fingerprint(model: Any) -> Hashable:
    """Checksums of all tensors; the config; the attributes, hooks and code of all modules."""
    sums = tuple(_checksum(tensor) for tensor in tensors_of(model, unsaved=True))
    config = _state(vars(model.config), 0)
    return counters(model), sums, config, tuple(map(_attributes, model.modules()))


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


def _attributes(module: Any) -> Hashable:
    """All attributes of a module, with its hooks and the function of its class."""
    found = tuple(
        (name, _state(value, 0)) for name, value in vars(module).items() if name not in IGNORED
    )
    return id(module), type(module), _state(type(module).forward, 0), found


def _state(value: Any, depth: int) -> Hashable:
    """The content of plain values, tensors and containers; a function with what it holds."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return _counter(value), _checksum(value)
    if depth > MAX_DEPTH:
        return id(value)
    if isinstance(value, list | tuple):
        return tuple(_state(part, depth + 1) for part in value)
    if isinstance(value, dict):
        return tuple((repr(key), _state(part, depth + 1)) for key, part in value.items())
    if isinstance(value, MethodType):
        return id(value.__self__), _state(value.__func__, depth + 1)
    if isinstance(value, partial):
        return _state([value.func, value.args, value.keywords], depth + 1)
    if isinstance(value, CODE):
        return value, *(_state(part, depth + 1) for part in _held_by(value))
    return id(value)


def _held_by(function: Any) -> Iterator[Any]:
    """The values that a function closes over, and its defaults."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None
    yield getattr(function, "__defaults__", None)
    yield getattr(function, "__kwdefaults__", None)
