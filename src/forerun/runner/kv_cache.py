"""KV cache of all sequences in one tensor; `slots.py` maps slots to tokens."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
import torch

from forerun.errors import CapacityError
from forerun.runner.free_memory import available_bytes
from forerun.runner.kv_memory import Cells
from forerun.runner.slots import Slot, Slots
from forerun.utils.device_copy import to_device

GRAPH_DEVICE_TYPES = ("cuda",)  # device types with graphs that store addresses of cells
MIN_GRAPH_CELLS = 2048  # initial cells of a slot on such devices, so that they move rarely
MAX_MEMORY_SHARE = 0.25  # of free memory, for cells allocated ahead of need


class Cache(Slots):
    """The cells: data [layers, slots, cells, 2, kv_heads, head_dim], grown as needed.

    The cells of a head are contiguous in memory (`Cells`), so its keys are read as one stream.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_slots: int,
        max_cells: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(max_slots)
        self.max_cells, self.dtype, self.device = max_cells, dtype, device
        self._next: Cells | None = None  # memory of the next size, allocated ahead
        self._lacked: tuple[int, ...] = ()  # a next size that did not fit into MAX_MEMORY_SHARE
        self._hold(self._cells((num_layers, 0, 0, 2, num_kv_heads, head_dim)).whole())

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self._next_bytes

    @property
    def _next_bytes(self) -> int:
        return 0 if self._next is None else self._next.nbytes

    def empty(self) -> Self:
        layers, _, _, _, num_kv_heads, head_dim = self.data.shape
        most = {"max_slots": self.max_slots, "max_cells": self.max_cells}
        kind = {"dtype": self.dtype, "device": self.device}
        return type(self)(layers, num_kv_heads, head_dim, **most, **kind)  # type: ignore[arg-type]

    def has_cells(self, slot: Slot) -> bool:
        return slot.index < self.data.shape[1]

    def can_keep_more(self) -> bool:
        """Whether another slot fits into MAX_MEMORY_SHARE if all grow to the whole context."""
        layers, _, _, *cell = self.data.shape
        return self._is_share((layers, len(self.slots) + 1, self.max_cells, *cell))

    def move(self, slot: Slot, source: list[int], start: int) -> None:
        cells = self._words[:, slot.index]
        where: Any = np.array(source)
        if self.device.type != "cpu":
            where = to_device(where, self.device)
        cells[:, start : start + len(source)] = cells[:, where]

    def copy(self, slot: Slot, other: Slot, length: int) -> None:
        self.reserve(slot, length)
        self.data[:, slot.index, :length] = self.data[:, other.index, :length]

    def drop(self, slot: Slot, layer: int, head: int, keep: np.ndarray) -> None:
        """Hides committed cells of one layer and KV head from all later rows.

        keep: bool [n]; cells from n on stay visible. Hidden cells keep their memory; they become
        visible only if computed again.
        """
        layers, _, _, _, num_kv_heads, _ = self.data.shape
        before = slot.dropped
        held = 0 if before is None else before.shape[2]
        dropped = np.zeros((layers, num_kv_heads, max(held, len(keep))), np.bool_)
        if before is not None:
            dropped[:, :, :held] = before
        dropped[layer, head, : len(keep)] |= ~keep
        slot.dropped = dropped

    def reserve(self, slot: Slot, cells: int) -> None:
        """Grows this slot (and all others) to `cells` cells.

        Raises CapacityError if they do not fit into memory.
        """
        layers, slots, have = self.size
        if slot.index < slots and cells <= have:
            return
        room, length = max(slots, slot.index + 1), max(have, cells)
        ample_room = room if room == slots else min(self.max_slots, max(2 * slots, room))
        ample = min(self.max_cells, max(2 * have, 256)) if length > have else have
        tail = self.data.shape[3:]
        if self.device.type in GRAPH_DEVICE_TYPES:
            all_at_once = (
                self.max_slots,
                max(length, min(self.max_cells, max(2 * have, MIN_GRAPH_CELLS))),
            )
            if self._is_share((layers, *all_at_once, *tail)):
                ample_room, ample = all_at_once
        try:
            self._grow((layers, ample_room, max(length, ample), *tail))
        except CapacityError:  # without spare cells
            self._grow((layers, room, length, *tail))

    def _is_share(self, shape: tuple[int, ...]) -> bool:
        """Whether cells of this shape take at most MAX_MEMORY_SHARE of free memory."""
        size = math.prod(shape) * self.dtype.itemsize
        return size <= MAX_MEMORY_SHARE * (available_bytes(self.device) + self.nbytes)

    def prepare(self, cells: int) -> None:
        """Allocates the next memory in parts once a pass needs more than half the cells.

        It is complete when seven eighths are in use, if it fits into MAX_MEMORY_SHARE.
        """
        layers, slots, have = self.size
        if 2 * cells <= have or have >= self.max_cells or self.device.type != "cpu":
            return
        shape = layers, slots, min(self.max_cells, 2 * have), *self.data.shape[3:]
        if self._next is None or self._next.shape != shape:
            size = math.prod(shape) * self.dtype.itemsize
            if self._lacked == shape:
                return
            if size > MAX_MEMORY_SHARE * available_bytes(self.device):
                self._lacked = shape
                return
            try:
                self._next = self._cells(shape)
            except (MemoryError, RuntimeError):  # a limit that only the allocation shows
                self._lacked = shape
                return
        self._next.ready((2 * cells - have) / (0.75 * have))

    def check_room(self, slots: int, cells: int, taken: int = 0) -> int:
        super().check_room(slots, cells)
        layers, have_slots, have_cells, *tail = self.data.shape
        if slots <= have_slots and cells <= have_cells:
            return 0
        shape = layers, max(slots, have_slots), max(cells, have_cells), *tail
        free = available_bytes(self.device) + self._next_bytes
        self._check(shape, max(free - taken, 0))
        return max(math.prod(shape) * self.dtype.itemsize - self.nbytes, 0)

    def _grow(self, shape: tuple[int, ...]) -> None:
        ahead, self._next = self._next, None
        if ahead is not None and ahead.shape != shape:
            ahead = None  # freed
        free = available_bytes(self.device) + (ahead.nbytes if ahead else 0)
        self._check(shape, free)
        try:
            data = (ahead or self._cells(shape)).whole()
            data[:, : self.data.shape[1], : self.data.shape[2]] = self.data
        except (MemoryError, RuntimeError) as cause:
            raise CapacityError(self._too_large(shape, free)) from cause
        self._hold(data)

    def _check(self, shape: tuple[int, ...], free: int) -> None:
        if torch.Size(shape).numel() * self.dtype.itemsize > free:
            raise CapacityError(self._too_large(shape, free))

    def _too_large(self, shape: tuple[int, ...], free: int) -> str:
        size = torch.Size(shape).numel() * self.dtype.itemsize
        return (
            f"the key-value cache needs {size / 2**20:.0f} MiB (sequences: {shape[1]}, tokens "
            f"of each: {shape[2]}), and {free / 2**20:.0f} MiB are free; use fewer sequences "
            "at once, shorter prompts, or a lower `context` when loading"
        )

    def _cells(self, shape: tuple[int, ...]) -> Cells:
        return Cells(shape, self.dtype, self.device)

    def _hold(self, data: torch.Tensor) -> None:
        self.data = data
        # cached: read in every pass
        self.size, self.address, self.strides = data.shape[:3], data.data_ptr(), data.stride()
        # NumPy view for moves of cells
        self._words: Any = data
        if data.device.type == "cpu":
            self._words = data.view(torch.int16 if data.itemsize == 2 else torch.int32).numpy()
