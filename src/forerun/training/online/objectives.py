"""What an online learner learns: which rows of a request are recorded, and their loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.training import losses
from forerun.training.losses import TopK

from .corrections import ClassOf, Corrections, Episode, OnEnd

AUTO = "auto"
MIX = 0.9  # share of the forward KL in loss "mix"
E = TypeVar("E", bound=Any)


def mixed_kl(student: Tensor, teacher: TopK) -> Tensor:
    """0.9 KL(p || q) + 0.1 KL(q || p)."""
    forward, reverse = losses.forward_kl(student, teacher), losses.reverse_kl(student, teacher)
    return MIX * forward + (1 - MIX) * reverse


LOSSES: dict[str, Callable[[Tensor, TopK], Tensor]] = {
    "fkl": losses.forward_kl,
    "rkl": losses.reverse_kl,
    "mix": mixed_kl,
}


class Objective(ABC, Generic[E]):
    """Collects episodes of type E from the steps of an engine, and computes their loss."""

    episode: ClassVar[type]

    @abstractmethod
    def listener(self, class_of: ClassOf, on_end: OnEnd, **options: Any) -> Corrections:
        """A listener that gives an episode per finished request; options of `Corrections`."""

    @abstractmethod
    def loss(self, logits: Tensor, episode: E) -> Tensor:
        """Mean loss of the positions of an episode, from the draft's logits at its rows."""

    @abstractmethod
    def acceptance(self, logits: Tensor, episode: E) -> Tensor:
        """Mean acceptance rate of the positions of an episode at temperature 1."""

    @abstractmethod
    def smallest(self) -> E:
        """An episode of one position, to warm up."""


class FromCorrections(Objective[Episode]):
    """OSD: a divergence from the target at the rows where it corrected the draft; auto is fkl."""

    episode = Episode

    def __init__(self, loss: str = AUTO) -> None:
        loss = "fkl" if loss == AUTO else loss
        if loss not in LOSSES:
            raise ConfigError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")
        self._divergence = LOSSES[loss]

    def listener(self, class_of: ClassOf, on_end: OnEnd, **options: Any) -> Corrections:
        return Corrections(class_of, on_end, **options)

    def loss(self, logits: Tensor, episode: Episode) -> Tensor:
        return self._divergence(logits, teacher_of(episode))

    def acceptance(self, logits: Tensor, episode: Episode) -> Tensor:
        """Mean of sum_x min(p(x), q(x))."""
        return losses.expected_acceptance(logits, teacher_of(episode))

    def smallest(self) -> Episode:
        row = np.zeros((1, 1), np.float32)
        tokens, rows, ids = np.zeros(2, np.int32), np.array([1]), np.zeros((1, 1), np.int32)
        return Episode(tokens, rows, ids, row - 1.0, row[0])


def teacher_of(episode: Any) -> TopK:
    """The stored rows of the target."""
    return TopK(
        torch.from_numpy(episode.ids.astype(np.int64)),
        torch.from_numpy(episode.logp),
        torch.from_numpy(episode.tail),
    )
