"""Distillation of a draft model: losses by name, the trained step, and the best weights so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import ConfigError
from forerun.training import losses
from forerun.training.data.documents import Micro
from forerun.training.language_model import LanguageModel
from forerun.training.losses import TopK
from forerun.utils.files import reports_no_room, write_atomically

Divergence = Callable[..., Tensor]  # (student logits, teacher, weights)
DIVERGENCES: dict[str, Divergence | None] = {
    "ce": None,  # cross-entropy with the tokens: sequence-level distillation
    "soft_ce": losses.soft_ce,
    "fkl": losses.forward_kl,
    "rkl": losses.reverse_kl,
    "jsd": losses.jsd,
    "tvd": losses.tvd,
    "tvd++": losses.tvd_pp,
    "tvd++position": partial(losses.tvd_pp, norm="position"),
}
TEXT = "text"  # source of micro-batches with cross-entropy, for every loss


def divergence(name: str) -> Divergence | None:
    """A loss by name; None is cross-entropy. Raises ConfigError."""
    if name not in DIVERGENCES:
        raise ConfigError(f"loss {name!r} is unknown; use one of {', '.join(DIVERGENCES)}")
    return DIVERGENCES[name]


class Distilled(LanguageModel):
    """Trains a draft on a divergence from the target's next-token distributions.

    The target is computed on the tokens of each batch; if the batch has stored top-k rows, these
    are used. Batches of the source "text" have cross-entropy.
    """

    def __init__(
        self, model: PreTrainedModel, data: Any, loss: Divergence | None, target: Any = None
    ) -> None:
        super().__init__(model, data)
        self.divergence, self.target = loss, target

    def loss(self, micro: Micro) -> Tensor:
        if self.divergence is None or micro.source == TEXT:
            return super().loss(micro)
        teacher = self.teacher(micro)
        return self.divergence(self.logits(micro), teacher, micro.weights[:, 1:])

    @torch.no_grad()
    def teacher(self, micro: Micro) -> Tensor | TopK:
        """The target's rows at all tokens but the last."""
        if micro.top_ids is not None and micro.top_logp is not None:
            tail = None if micro.tail_logp is None else micro.tail_logp[:, :-1]
            return TopK(micro.top_ids[:, :-1], micro.top_logp[:, :-1], tail)
        packed = {} if micro.positions is None else {"position_ids": micro.positions[:, :-1]}
        with torch.autocast(micro.tokens.device.type, enabled=False):
            return self.target(input_ids=micro.tokens[:, :-1], use_cache=False, **packed).logits


@dataclass
class Best:
    """The weights with the highest held-out acceptance, kept in a folder."""

    folder: Path

    @property
    def found(self) -> dict[str, Any]:
        """Phase, step and acceptance of the kept weights; empty if there are none."""
        path = self.folder / "best.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def offer(
        self, model: torch.nn.Module, phase: str, step: int, rates: Mapping[str, float]
    ) -> bool:
        """Keeps the weights if their acceptance is the highest so far.

        Raises CapacityError if the disk has no room; the weights kept before stay.
        """
        from safetensors.torch import save_file

        if rates["all"] <= self.found.get("all", -1.0):
            return False
        name = f"best-{phase}-{step}.safetensors"  # the JSON file names it, so both change at once
        tensors = {n: p.detach().clone().contiguous() for n, p in model.named_parameters()}
        text = json.dumps({"file": name, "phase": phase, "step": step, **rates}, indent=2) + "\n"
        with reports_no_room(self.folder / name):
            write_atomically(self.folder / name, lambda part: save_file(tensors, part))
            write_atomically(self.folder / "best.json", lambda part: part.write_text(text))
        for old in self.folder.glob("best-*.safetensors"):
            if old.name != name:
                old.unlink()
        return True

    def restore(self, model: torch.nn.Module) -> None:
        """Loads the kept weights into a model."""
        from safetensors.torch import load_file

        kept = load_file(self.folder / self.found["file"])
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(kept[name])
