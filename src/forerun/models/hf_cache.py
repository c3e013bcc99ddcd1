"""One transformers cache per slot, for models that transformers runs."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from forerun.core.records import Sequence
from forerun.runner.slots import Slot, Slots


@dataclass
class Held:
    """A transformers cache and the number of tokens in it."""

    cache: Any
    length: int = 0
    is_late: bool = False  # whether a pass went beyond the switch of the rotary tables
    tag: Hashable = None  # of the weights that computed the cells; None: unknown, not shared

    def copy(self) -> Held:
        """A copy that can be extended."""
        return Held(copy.deepcopy(self.cache), self.length, self.is_late, self.tag)

    def cut(self, length: int) -> None:
        """Drops the cells from `length` on."""
        for layer in self.cache.layers:  # lengths may differ after an interrupted move
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        self.length = min(self.length, length)


class Caches(Slots):
    """One transformers cache per slot. config: None gives plain caches with movable cells.

    switch: text length from which cells depend on the length of their pass. tag: identifies the
    current weights; a new sequence shares only cells with this tag.
    """

    def __init__(
        self, max_slots: int, config: Any, *, can_move: bool, switch: int | None = None
    ) -> None:
        super().__init__(max_slots)
        self.can_move, self.switch, self._config = can_move, switch, config
        self.tag: Hashable = "the only weights"
        self._held: dict[int, Held] = {}

    @property
    def nbytes(self) -> int:
        return sum(
            tensor.nbytes
            for held in self._held.values()
            for layer in held.cache.layers
            for tensor in vars(layer).values()
            if isinstance(tensor, Tensor)
        )

    def empty(self) -> Self:
        return type(self)(self.max_slots, self._config, can_move=self.can_move, switch=self.switch)

    def held(self, slot: Slot) -> Held:
        """The cache of a slot."""
        if slot.index not in self._held:
            return self.renew(slot)
        return self._held[slot.index]

    def renew(self, slot: Slot) -> Held:
        """An empty cache for a slot."""
        self._held[slot.index] = Held(self.new(), tag=self.tag)
        return self._held[slot.index]

    def new(self) -> Any:
        """An empty transformers cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self._config) if self._config else DynamicCache()

    def drop_free(self) -> None:
        """Drops the cells of all slots without a sequence."""
        for slot in self.slots:
            if slot.is_free:
                slot.truncate(0)
                self._held.pop(slot.index, None)

    def _shared(self, slot: Slot, seq: Sequence) -> int:
        held = self._held.get(slot.index)
        if held is None or self.tag is None or held.tag != self.tag:
            return 0
        if self.switch is not None and (held.is_late or len(seq.tokens) > self.switch):
            return 0
        return super()._shared(slot, seq)

    def _acquire(self, seq: Sequence) -> Slot:
        slot = super()._acquire(seq)
        if not slot.tokens:
            self.renew(slot)
        return slot

    def move(self, slot: Slot, source: list[int], start: int) -> None:
        held, cells = self.held(slot), torch.tensor(source)
        for layer in held.cache.layers:
            index = cells.to(layer.keys.device)
            for part in (layer.keys, layer.values):
                part[:, :, start : start + len(source)] = part.index_select(2, index)
        held.cut(start + len(source))

    def copy(self, slot: Slot, other: Slot, length: int) -> None:
        if not self.can_move:  # tokens are computed again
            self.renew(slot)
            return
        self._held[slot.index] = held = self.held(other).copy()
        held.cut(length)
