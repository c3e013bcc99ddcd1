"""Checkpoints of a training run: parameters, optimizer state and progress in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forerun.errors import DataError
from forerun.utils.files import reports_no_room, write_atomically


def save_checkpoint(
    path: Path,
    parameters: dict[str, torch.nn.Parameter],
    optimizers: list[torch.optim.Optimizer],
    progress: dict[str, Any],
) -> None:
    """Writes the checkpoint atomically; if that fails, the earlier one stays.

    Raises CapacityError if the disk has no room.
    """
    state = {
        "parameters": {name: p.detach().cpu() for name, p in parameters.items()},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": progress,
    }
    save_state(path, state)


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes tensors and plain values atomically. Raises CapacityError if the disk has no room."""
    with reports_no_room(path):
        write_atomically(path, lambda part: _save(state, part))


def _save(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:  # torch's own files lose the system's error
        torch.save(state, file)


def restore_checkpoint(
    path: Path,
    parameters: dict[str, torch.nn.Parameter],
    optimizers: list[torch.optim.Optimizer],
) -> dict[str, Any]:
    """Restores parameters and optimizers in place; returns the progress.

    Raises DataError for an unreadable file, and for a checkpoint of another model.
    """
    state = load_checkpoint(path)
    if _shapes(state["parameters"]) != _shapes(parameters):
        raise DataError(
            f"{path} holds another model; use another folder, or delete the file to start over"
        )
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(state["parameters"][name])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["progress"]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's contents on the CPU. Raises DataError."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for damaged files
        raise DataError(
            f"{path} is not a readable checkpoint ({error}); delete it to start over"
        ) from error


def _shapes(parameters: dict[str, Any]) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in parameters.items()}
