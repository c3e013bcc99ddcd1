"""Sorted training: several depths of one model learn together (Kavehzadeh et al., S2D, 2024).

The sub-model of depth k is the first k layers with the final norm and the head of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.training.data.documents import Batches, Micro
from forerun.training.language_model import LanguageModel


class SortedModel(LanguageModel):
    """Trains all sub-models of a draft with a linear head: the mean of their cross-entropies."""

    def __init__(self, model: PreTrainedModel, data: Batches, exits: Sequence[int]) -> None:
        super().__init__(model, data)
        self.exits = tuple(exits)

    def loss(self, micro: Micro) -> Tensor:
        """Mean over the exits of the weighted cross-entropy; one forward pass serves all."""
        inner, found = self.model.model, []
        with inputs_of(self.model) as rows:
            last = self.outputs(micro, inner).last_hidden_state
        for depth in self.exits:
            hidden = last if depth == len(rows) else inner.norm(rows[depth])
            found.append(self.head_loss(hidden, micro))
        return torch.stack(found).mean()


@contextmanager
def inputs_of(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A block after which the list holds the input of each layer: [k] is the output of k layers."""
    rows = list[Tensor]()

    def keep(module: nn.Module, args: tuple, kwargs: dict) -> None:
        rows.append(args[0] if args else kwargs["hidden_states"])

    hooks = [
        layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers
    ]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def cut(model: PreTrainedModel, depth: int) -> Iterator[PreTrainedModel]:
    """A block in which the model is its sub-model of this depth."""
    layers = model.model.layers
    model.model.layers = layers[:depth]
    try:
        yield model
    finally:
        model.model.layers = layers
