"""One transformers cache per slot, for models that transformers runs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from forerun.runner.slots import Slot, Slots


@dataclass
class Held:
    """A transformers cache and the number of tokens in it."""

    cache: Any
    length: int = 0

    def cut(self, length: int) -> None:
        """Drops the cells from `length` on."""
        for layer in self.cache.layers:  # lengths may differ after an interrupted move
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        self.length = min(self.length, length)


class Caches(Slots):
    """One transformers cache per slot. config: None gives plain caches with movable cells."""

    def __init__(self, max_slots: int, config: Any, *, can_move: bool) -> None:
        super().__init__(max_slots)
        self.can_move, self._config = can_move, config
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
        return type(self)(self.max_slots, self._config, can_move=self.can_move)

    def held(self, slot: Slot) -> Held:
        """The cache of a slot."""
        if slot.index not in self._held:
            return self.renew(slot)
        return self._held[slot.index]

    def renew(self, slot: Slot) -> Held:
        """An empty cache for a slot."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._config) if self._config else DynamicCache()
        self._held[slot.index] = Held(cache)
        return self._held[slot.index]

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
        self._held[slot.index] = held = copy.deepcopy(self.held(other))
        held.cut(length)
