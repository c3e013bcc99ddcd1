"""The training loop: a recipe says what to learn; steps, schedule, checkpoints are here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from forerun.errors import ConfigError, DataError
from forerun.utils.files import write_atomically
from forerun.utils.signals import uninterrupted

from .data import Micro


class Recipe(Protocol):
    """What one run learns: batches by step number, a loss, and the parameters that move."""

    def batches(self, start: int) -> Iterator[list[Micro]]:
        """Steps from number `start` on, the same ones whether or not the run was interrupted."""
        ...

    def loss(self, micro: Micro) -> torch.Tensor:
        """The micro-batch's share of the step's mean loss, in nats per weighted token."""
        ...

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by name."""
        ...


@dataclass(frozen=True)
class LoopOptions:
    """Budget, step sizes and habits of a run; the first budget that runs out ends it."""

    max_steps: int | None = None
    minutes: float | None = None
    matrix_rate: float = 0.02  # Muon, for hidden matrices
    other_rate: float = 0.004  # AdamW, for embeddings and vectors
    weight_decay: float = 0.02
    warmup_steps: int = 50
    decay_share: float = 0.5  # last part of the budget, in which the rate falls linearly
    clip: float = 1.0
    checkpoint_minutes: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.max_steps and not self.minutes:
            raise ConfigError(
                "a run needs max_steps or minutes above zero, got neither; e.g. minutes=60"
            )


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    seconds: float = 0.0  # of training, over all sittings
    tokens: int = 0
    loss: float = float("nan")  # smoothed
    finished: bool = False
    history: list[tuple[int, float, float]] = field(default_factory=list)  # step, seconds, loss

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Loop:
    """Trains a recipe until its budget is spent, with a checkpoint every few minutes."""

    def __init__(
        self,
        recipe: Recipe,
        options: LoopOptions,
        device: torch.device,
        checkpoint: Path | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> None:
        self.recipe, self.options, self.device = recipe, options, device
        self.checkpoint, self.on_step = checkpoint, on_step
        self.progress = Progress()
        self.parameters = recipe.parameters()
        self.optimizers = make_optimizers(self.parameters, options)
        self.base_rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        torch.manual_seed(options.seed)

    def run(self) -> Progress:
        """Trains to the end of the budget; on Ctrl-C saves first, then raises KeyboardInterrupt."""
        saved = time.monotonic()
        batches = self.recipe.batches(self.progress.step)
        try:
            while (spent := self._agree(self.spent())) < 1:
                micros = next(batches)
                with uninterrupted():  # or one optimizer has moved and the other has not
                    self._step(micros, spent)
                if time.monotonic() - saved > 60 * self.options.checkpoint_minutes:
                    self.save()
                    saved = time.monotonic()
        except KeyboardInterrupt:
            with uninterrupted():
                self.save()
            raise
        self.progress.finished = True
        self.save()
        return self.progress

    def spent(self) -> float:
        """Share of the budget that is used up."""
        steps, minutes = self.options.max_steps, self.options.minutes
        shares = [self.progress.step / steps] if steps else []
        shares += [self.progress.seconds / (60 * minutes)] if minutes else []
        return max(shares)

    def save(self) -> None:
        """Writes parameters, optimizer state and progress as one file (first process only)."""
        if self.checkpoint is None or (dist.is_initialized() and dist.get_rank()):
            return
        state = {
            "parameters": {name: p.detach().cpu() for name, p in self.parameters.items()},
            "optimizers": [o.state_dict() for o in self.optimizers],
            "progress": vars(self.progress),
        }
        write_atomically(self.checkpoint, lambda path: torch.save(state, path))

    def resume(self) -> bool:
        """Continues from the checkpoint; False where there is none."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return False
        state = load_checkpoint(self.checkpoint)
        if _shapes(state["parameters"]) != _shapes(self.parameters):
            raise DataError(
                f"{self.checkpoint} holds another model; choose another folder or delete it"
            )
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(state["parameters"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"] | {"finished": False})
        return True

    def _agree(self, value: float) -> float:
        """The first process's value, in every process."""
        if not dist.is_initialized():
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, src=0)
        return float(shared)

    def _step(self, micros: list[Micro], spent: float) -> None:
        start = time.monotonic()
        factor = rate_factor(self.progress.step, spent, self.options)
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        loss = self._gradients(micros)
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.options.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._record(loss, sum(m.num_tokens for m in micros), time.monotonic() - start)

    def _gradients(self, micros: list[Micro]) -> float:
        """Gradients of the whole step, shared out between processes; the step's loss."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        total = torch.zeros(1)
        for micro in micros[rank::size]:
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = self.recipe.loss(micro.to(self.device))
            loss.backward()
            total += float(loss.detach())
        if size > 1:
            self._sum_over_processes(total)
        if not math.isfinite(total):
            raise DataError(
                f"loss became {float(total)} at step {self.progress.step};"
                " try a lower learning rate"
            )
        return float(total)

    def _sum_over_processes(self, total: torch.Tensor) -> None:
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        flat = torch.cat([total] + [g.flatten().cpu() for g in grads])
        dist.all_reduce(flat)
        total.copy_(flat[:1])
        for g, part in zip(grads, flat[1:].split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))

    def _record(self, loss: float, tokens: int, seconds: float) -> None:
        p = self.progress
        p.step, p.tokens, p.seconds = p.step + 1, p.tokens + tokens, p.seconds + seconds
        p.loss = loss if math.isnan(p.loss) else 0.98 * p.loss + 0.02 * loss
        if p.step % 50 == 0:
            p.history.append((p.step, p.seconds, p.loss))
        if self.on_step:
            self.on_step(p)


def _shapes(parameters: dict[str, Any]) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in parameters.items()}


def rate_factor(step: int, spent: float, options: LoopOptions) -> float:
    """Warm-up, constant, then linear decay to a hundredth (warmup-stable-decay).

    A larger budget makes the share spent smaller, so a run that goes on after its end goes back up.
    """
    warmup = min(1.0, (step + 1) / max(1, options.warmup_steps))
    decay = min(1.0, (1 - spent) / options.decay_share) if options.decay_share else 1.0
    return warmup * max(0.01, decay)


def make_optimizers(
    parameters: dict[str, torch.nn.Parameter], options: LoopOptions
) -> list[torch.optim.Optimizer]:
    """Muon (Jordan 2024) for hidden matrices, AdamW for embeddings, norms and everything else."""
    hidden = [
        p
        for name, p in parameters.items()
        if p.ndim == 2 and "embed" not in name and "head" not in name
    ]
    kept = {id(p) for p in hidden}
    others = [p for p in parameters.values() if id(p) not in kept]
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


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's contents on the CPU."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} is not a readable checkpoint ({error}); delete it to start anew"
        ) from error
