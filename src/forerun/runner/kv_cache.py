"""Key-value cells of all sequences in one tensor. State follows tokens: a slot knows what it holds.

A slot holds committed cells (cell i is position i) and behind them scratch cells: the tree nodes of
the last pass. `sync` compares both with a sequence's tokens, keeps what agrees and moves accepted
nodes into place, so nothing is ever rolled back. A free slot keeps its tokens until it is reused,
and a new sequence takes over the longest prefix that any slot holds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np
import torch

from forerun.core.records import Sequence
from forerun.errors import CapacityError
from forerun.runner.free_memory import available_bytes
from forerun.runner.kv_memory import Cells
from forerun.runner.slot import Slot, common_prefix

DEAR = 64  # tokens that are worth a slot of their own
MAX_KEPT = 4  # free slots that are kept for the conversations they hold
RECORDED, AT_ONCE = ("cuda",), 2048  # where graphs know cells by addresses: cells from the start
SHARE = 0.25  # of memory that slots may take, so that conversations are kept


class Slots(ABC):
    """Which slot belongs to which sequence, and which tokens it holds; the cells are a subclass's.

    can_move: cells of scratch nodes outlive their pass, so accepted nodes need no second one.
    """

    can_move = True

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.slots: list[Slot] = []
        self._of: WeakKeyDictionary[Sequence, Slot] = WeakKeyDictionary()
        self._guests: WeakSet[Sequence] = WeakSet()  # without a slot; each may need one any time
        self.reused: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # tokens found, by who
        self._clock = 0

    @abstractmethod
    def empty(self) -> Self:
        """Another one of this kind, which holds nothing."""

    @abstractmethod
    def move(self, slot: Slot, source: list[int], start: int) -> None:
        """Copies the cells `source` to the cells from `start` on."""

    @abstractmethod
    def copy(self, slot: Slot, other: Slot, length: int) -> None:
        """Copies the first `length` cells of another slot."""

    def has_cells(self, slot: Slot) -> bool:
        """Whether the slot has been given cells; memory may have been full."""
        return True

    def check_room(self, slots: int, cells: int, taken: int = 0) -> int:
        """Bytes that so many slots of so many cells take beside those that are held, if known.

        taken: bytes that others will. Raises CapacityError if the slots may not be, or do not fit.
        """
        if slots > self.max_slots:
            raise CapacityError(
                f"max_seqs is {self.max_slots}, and {slots} sequences were asked for; load the "
                "model with a larger max_seqs, or use a smaller batch"
            )
        return 0

    def can_keep_more(self) -> bool:
        """Whether memory allows a slot more than what runs needs, for a conversation that rests."""
        return False

    def sync(self, seq: Sequence) -> Slot:
        """The slot of `seq`, with everything it holds agreeing with seq.tokens.

        Tokens that scratch nodes spell are committed, all but the last one, whose row is wanted.
        """
        slot = self._of.get(seq)
        if slot is None:
            slot = self._acquire(seq)
        self._clock += 1
        slot.used = self._clock
        held, tokens = len(slot.tokens), seq.tokens
        agreed = slot.agreed(tokens)
        if agreed < held:
            slot.truncate(min(agreed, len(tokens) - 1))
        elif held < len(tokens):
            self._follow(slot, tokens)
        slot.synced = tokens
        return slot

    def holds(self, seq: Sequence) -> bool:
        """Whether the sequence has a slot."""
        return seq in self._of

    @property
    def num_held(self) -> int:
        """Sequences that have a slot, or follow one that has."""
        return sum(not slot.is_free for slot in self.slots) + len(self._guests)

    def follow(self, seq: Sequence) -> None:
        """The sequence took the rows of another one, and has no slot yet."""
        self._guests.add(seq)
        self.reused.setdefault(seq, len(seq.tokens) - 1)

    def known(self, seq: Sequence) -> int:
        """Tokens that its own slot holds; what others' do hangs on who else was here."""
        slot = self._of.get(seq)
        return 0 if slot is None else min(len(slot.tokens), len(seq.tokens))

    def release(self, seq: Sequence) -> None:
        """Frees the slot; its tokens stay until it is reused."""
        self._guests.discard(seq)
        slot = self._of.pop(seq, None)
        if slot is not None:
            slot.owner = slot.synced = None
            slot.restore()

    def invalidate(self) -> None:
        """Drops all cells: the weights have changed. Sequences keep their slots."""
        for slot in self.slots:
            slot.truncate(0)
            slot.dropped = slot.synced = None

    def _follow(self, slot: Slot, tokens: list[int]) -> None:
        """Commits the scratch nodes that the new tokens spell, moving their cells into place."""
        start = len(slot.tokens)
        path = slot.walk(tokens[start:-1]) if slot.nodes and self.can_move else []
        partial = slot.partial if len(tokens) == start + 1 else None  # its root is still the last
        slot.clear_scratch()  # before the move: an interrupted one must not be tried again
        source, stop = [start + node for node in path], start + len(path)
        if source != list(range(start, stop)):
            self.move(slot, source, start)
        slot.tokens += tokens[start:stop]
        slot.partial = partial

    def _acquire(self, seq: Sequence) -> Slot:
        found = [(self._shared(s, seq), s.is_free, -s.used, s) for s in self.slots]
        shared, _, _, best = max(found, key=lambda f: f[:3], default=(0, False, 0, None))
        slot = self._choose(best if shared else None, shared, len(seq.tokens))
        slot.restore()
        slot.clear_scratch()
        slot.synced = None
        if best is not None and slot is not best and shared:
            self.copy(slot, best, shared)
            slot.tokens = best.tokens[:shared]
        slot.truncate(shared)
        slot.owner = ref(seq)
        self._of[seq] = slot
        self._guests.discard(seq)
        self.reused.setdefault(seq, shared)
        return slot

    @staticmethod
    def _shared(slot: Slot, seq: Sequence) -> int:
        """Cells of a slot that a newcomer may take over."""
        return 0 if slot.is_altered else common_prefix(slot.tokens, seq.tokens)

    def _choose(self, best: Slot | None, shared: int, wanted: int) -> Slot:
        """The slot for a newcomer of `wanted` tokens, the first `shared` of which `best` holds.

        A free slot whose tokens would be DEAR to compute again is left to its conversation while
        few are, and memory is ample. So the order is: one that loses little, `best` before the
        others; a new one if that may be; the least recently used free one.
        """
        lost = len(best.tokens) - shared if best is not None else 0
        # another trajectory of the same prompt, or the same turn again: nobody wants what is lost
        is_again = shared >= wanted - 1
        if best is not None and best.is_free and (is_again or lost < DEAR):
            return best
        free = [slot for slot in self.slots if slot.is_free]
        cheap = [slot for slot in free if len(slot.tokens) < DEAR and self.has_cells(slot)]
        keeps = not cheap and len(free) < MAX_KEPT and self.can_keep_more()
        if (keeps or not free) and len(self.slots) < self.max_slots:
            self.slots.append(Slot(len(self.slots)))
            return self.slots[-1]
        if free:  # one without tokens may have no cells yet, and memory may be full
            return min(cheap or free, key=lambda s: (not s.tokens, s.used))
        raise CapacityError(
            f"max_seqs is {self.max_slots}, and one more sequence came; load the model with a "
            "larger max_seqs, or use a smaller batch"
        )


class Cache(Slots):
    """The cells: data [layers, slots, cells, 2, kv_heads, head_dim], grown as needed.

    In memory a head's cells are neighbours (`Cells`): its keys, or values, are read as one stream.
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
        self._soon: Cells | None = None  # of the size that comes next
        self._lacked: tuple[int, ...] = ()  # such a size for which memory was not ample
        self._hold(self._cells((num_layers, 0, 0, 2, num_kv_heads, head_dim)).whole())

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self._soon_bytes

    @property
    def _soon_bytes(self) -> int:
        return 0 if self._soon is None else self._soon.nbytes

    def empty(self) -> Self:
        layers, _, _, _, num_kv_heads, head_dim = self.data.shape
        most = {"max_slots": self.max_slots, "max_cells": self.max_cells}
        kind = {"dtype": self.dtype, "device": self.device}
        return type(self)(layers, num_kv_heads, head_dim, **most, **kind)  # type: ignore[arg-type]

    def has_cells(self, slot: Slot) -> bool:
        return slot.index < self.data.shape[1]

    def can_keep_more(self) -> bool:
        """Even if all slots grew to the whole context they would take SHARE of memory at most."""
        layers, _, _, *cell = self.data.shape
        return self._is_share((layers, len(self.slots) + 1, self.max_cells, *cell))

    def move(self, slot: Slot, source: list[int], start: int) -> None:
        cells = self._words[:, slot.index]
        where: Any = np.array(source)
        if self.device.type != "cpu":
            where = torch.from_numpy(where).to(self.device)
        cells[:, start : start + len(source)] = cells[:, where]

    def copy(self, slot: Slot, other: Slot, length: int) -> None:
        self.reserve(slot, length)
        self.data[:, slot.index, :length] = self.data[:, other.index, :length]

    def drop(self, slot: Slot, layer: int, head: int, keep: np.ndarray) -> None:
        """Hides committed cells of one layer and KV head from all later rows.

        keep: bool [n]; cells from n on stay. Hidden cells keep their memory; they come back only
        where they are computed again.
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
        """Makes room for `cells` cells in this slot (and all others).

        Raises CapacityError if they do not fit into memory.
        """
        layers, slots, have = self.size
        if slot.index < slots and cells <= have:
            return
        room, length = max(slots, slot.index + 1), max(have, cells)
        ample_room = room if room == slots else min(self.max_slots, max(2 * slots, room))
        ample = min(self.max_cells, max(2 * have, 256)) if length > have else have
        tail = self.data.shape[3:]
        if self.device.type in RECORDED:
            all_at_once = self.max_slots, max(length, min(self.max_cells, max(2 * have, AT_ONCE)))
            if self._is_share((layers, *all_at_once, *tail)):
                ample_room, ample = all_at_once
        try:
            self._grow((layers, ample_room, max(length, ample), *tail))
        except CapacityError:  # no room to spare: only what is needed
            self._grow((layers, room, length, *tail))

    def _is_share(self, shape: tuple[int, ...]) -> bool:
        """Whether cells of this shape take SHARE of memory at most."""
        size = math.prod(shape) * self.dtype.itemsize
        return size <= SHARE * (available_bytes(self.device) + self.nbytes)

    def prepare(self, cells: int) -> None:
        """Takes a part of the memory that comes next where a pass needs more than half the cells.

        It is there when seven eighths are in use, if memory is ample.
        """
        layers, slots, have = self.size
        if 2 * cells <= have or have >= self.max_cells or self.device.type != "cpu":
            return
        shape = layers, slots, min(self.max_cells, 2 * have), *self.data.shape[3:]
        if self._soon is None or self._soon.shape != shape:
            size = math.prod(shape) * self.dtype.itemsize
            if self._lacked == shape:
                return
            if size > SHARE * available_bytes(self.device):
                self._lacked = shape
                return
            try:
                self._soon = self._cells(shape)
            except (MemoryError, RuntimeError):  # a limit that is seen only when it is met
                self._lacked = shape
                return
        self._soon.ready((2 * cells - have) / (0.75 * have))

    def check_room(self, slots: int, cells: int, taken: int = 0) -> int:
        super().check_room(slots, cells)
        layers, have_slots, have_cells, *tail = self.data.shape
        if slots <= have_slots and cells <= have_cells:
            return 0
        shape = layers, max(slots, have_slots), max(cells, have_cells), *tail
        free = available_bytes(self.device) + self._soon_bytes
        self._check(shape, max(free - taken, 0))
        return max(math.prod(shape) * self.dtype.itemsize - self.nbytes, 0)

    def _grow(self, shape: tuple[int, ...]) -> None:
        soon, self._soon = self._soon, None
        if soon is not None and soon.shape != shape:
            soon = None  # freed
        free = available_bytes(self.device) + (soon.nbytes if soon else 0)
        self._check(shape, free)
        try:
            data = (soon or self._cells(shape)).whole()
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
        # asked for in every pass, and every way into torch is dear
        self.size, self.address, self.strides = data.shape[:3], data.data_ptr(), data.stride()
        # the same memory for moves; NumPy's indexing costs a fraction of torch's
        self._words: Any = data
        if data.device.type == "cpu":
            self._words = data.view(torch.int16 if data.itemsize == 2 else torch.int32).numpy()
