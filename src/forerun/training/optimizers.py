"""Optimizers of the training loop, and the learning rate schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .loop import LoopOptions


def make_optimizers(
    parameters: dict[str, torch.nn.Parameter], options: LoopOptions
) -> list[torch.optim.Optimizer]:
    """Muon (Jordan 2024) for hidden matrices, AdamW for embeddings, norms and everything else."""
    hidden = [
        p
        for name, p in parameters.items()
        if p.ndim == 2 and "embed" not in name and "head" not in name
    ]
    is_hidden = {id(p) for p in hidden}
    others = [p for p in parameters.values() if id(p) not in is_hidden]
    made: list[torch.optim.Optimizer] = []
    if hidden:
        made.append(
            torch.optim.Muon(hidden, lr=options.matrix_rate, weight_decay=options.weight_decay)
        )
    if others:
        made.append(
            torch.optim.AdamW(others, lr=options.other_rate, betas=(0.9, 0.98), weight_decay=0.0)
        )
    return made


def rate_factor(step: int, spent: float, options: LoopOptions) -> float:
    """Learning rate factor: warm-up, constant, then linear decay to 0.01 (warmup-stable-decay).

    spent: used share of the budget. A finished run that continues with a larger budget returns to a
    higher rate.
    """
    warmup = min(1.0, (step + 1) / max(1, options.warmup_steps))
    decay = min(1.0, (1 - spent) / options.decay_share) if options.decay_share else 1.0
    return warmup * max(0.01, decay)


def set_rates(
    optimizers: list[torch.optim.Optimizer], base: list[list[float]], factor: float
) -> None:
    """Sets every parameter group's rate to its base rate times `factor`."""
    for optimizer, rates in zip(optimizers, base, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
