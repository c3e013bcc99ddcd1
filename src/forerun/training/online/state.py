"""The state of an online learner as tensors and plain values, to continue an interrupted replay."""

from __future__ import annotations

from typing import Any

import torch

from .corrections import Episode
from .learner import Learner, OnlineLearner

State = dict[str, Any]


def state_of(learner: OnlineLearner) -> State:
    """Weights, optimizers, buffers, held-out requests and counts of all classes."""
    return {
        "counts": dict(learner.listen.counts),
        "held": [(kind, _packed(episode)) for kind, episode in learner.held],
        "buffers": {
            kind: {
                "num_requests": buffer.num_requests,
                "num_dropped": buffer.num_dropped,
                "episodes": [_packed(episode) for episode in buffer.episodes()],
            }
            for kind, buffer in learner.buffers.items()
        },
        "learners": {kind: _learner_state(one) for kind, one in learner.learners.items()},
    }


def restore(learner: OnlineLearner, state: State) -> None:
    """Puts a new learner into a saved state."""
    kind_of = learner.objective.episode
    learner.listen.counts.update(state["counts"])
    learner.held.extend((kind, _unpacked(kind_of, one)) for kind, one in state["held"])
    for kind, saved in state["buffers"].items():
        buffer = learner.buffer(kind)
        for one in saved["episodes"]:
            buffer.add(_unpacked(kind_of, one))
        buffer.num_requests, buffer.num_dropped = saved["num_requests"], saved["num_dropped"]
    for kind, saved in state["learners"].items():
        _restore_learner(learner.learner(kind), saved, kind_of)


def _learner_state(one: Learner) -> State:
    return {
        "weights": one.copied(),
        "average": dict(one.average),
        "optimizer": one.optimizer.state_dict(),
        "counts": (one.version, one.num_fallbacks, one.num_rows),
        "loss": one.loss,
        "held": [_packed(episode) for episode in one.held],
    }


def _restore_learner(one: Learner, saved: State, kind_of: type[Episode]) -> None:
    one.reset(saved["weights"])
    one.average = dict(saved["average"])
    one.optimizer.load_state_dict(saved["optimizer"])
    one.version, one.num_fallbacks, one.num_rows = saved["counts"]
    one.loss = saved["loss"]
    one.held.extend(_unpacked(kind_of, episode) for episode in saved["held"])


def _packed(episode: Episode) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in vars(episode).items()}


def _unpacked(kind: type[Episode], saved: dict[str, torch.Tensor]) -> Episode:
    return kind(**{name: tensor.numpy() for name, tensor in saved.items()})
