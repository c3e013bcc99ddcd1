"""A device that is none: tensors that say they lie on "meta", with values that only ops may touch.

While a `Watch` is on, everything that is made on "meta" has values, and the watch notes what makes
a host wait for a GPU: numbers and copies that come to the host, shapes that depend on values, and
copies to the device that are not marked as non-blocking.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

AWAY = torch.device("meta")
aten = torch.ops.aten
NUMBERS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
SHAPES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}
COPIES = {aten._to_copy.default, aten.copy_.default, aten.index_put_.default, aten.index.Tensor}


class FakeDeviceTensor(Tensor):
    """A tensor on the device; `inner` has its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> FakeDeviceTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=AWAY,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the device outside a Watch")

    def data_ptr(self) -> int:
        return 0  # which no kernel of ours is given


class Watch(TorchDispatchMode):
    """Runs ops on the values, and notes events: (kind, name of the op)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []

    def count(self, *kinds: str) -> int:
        """Events of these kinds."""
        return sum(kind in kinds for kind, _ in self.events)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat: list[Any] = []
        tree_map(flat.append, (args, {k: v for k, v in kwargs.items() if k != "device"}))
        here = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, FakeDeviceTensor)]
        there = [x for x in flat if isinstance(x, FakeDeviceTensor)]
        assert not any(x.is_meta for x in here), f"{func} is given a tensor without values"
        goal = kwargs.get("device")
        is_away = goal is not None and torch.device(goal) == AWAY
        if is_away:
            kwargs["device"] = torch.device("cpu")
        self._note(func, args, kwargs, here, there, goal, is_away)
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        if func is aten._to_copy.default and not inner_kwargs.get("device"):
            inner_kwargs.pop("device", None)
        found = func(*inner_args, **inner_kwargs)
        leaves = goal is not None and not is_away
        if leaves or not (there or is_away):
            return found
        known = {id(x.inner): x for x in there}  # an op in place gives back what it was given
        return tree_map(lambda x: known[id(x)] if id(x) in known else _away(x), found)

    def _note(
        self, func: Any, args: Any, kwargs: dict, here: list, there: list, goal: Any, is_away: bool
    ) -> None:
        name = str(func)
        if func in NUMBERS and there:
            self.events.append(("number", name))
        if func in SHAPES and there:
            self.events.append(("shape", name))
        if func is aten.index.Tensor and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        ):
            self.events.append(("shape", name))
        if there and goal is not None and not is_away:
            self.events.append(("to host", name))
        if func is aten.copy_.default and there and here:
            is_blocking = not (kwargs.get("non_blocking") or len(args) > 2 and args[2])
            sent = "to device, blocking" if is_blocking else "to device"
            is_sent = isinstance(args[0], FakeDeviceTensor)
            self.events.append((sent if is_sent else "to host", name))
        if here and not there and is_away and any(x.numel() for x in here):
            is_blocking = not kwargs.get("non_blocking")
            self.events.append(("to device, blocking" if is_blocking else "to device", name))
        if func in (aten.mm.default, aten.addmm.default) and there:
            self.events.append(("product", name))


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, FakeDeviceTensor) else x


def _away(x: Any) -> Any:
    return FakeDeviceTensor(x) if isinstance(x, Tensor) else x
