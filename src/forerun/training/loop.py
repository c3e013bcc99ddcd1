"""The training loop: steps, learning rate schedule and checkpoints of a recipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from forerun.errors import ConfigError, Diverged
from forerun.utils.renamed import renamed
from forerun.utils.signals import delayed_interrupt

from .checkpoints import restore_checkpoint, save_checkpoint
from .data.documents import Micro
from .optimizers import make_optimizers, rate_factor, set_rates
from .processes import agree, is_first_process, is_in_group, my_share, sum_gradients

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__, Recipe="training.recipes.base.Recipe")


class Trainable(Protocol):
    """Interface of the loop: batches by step number, a loss, trained parameters."""

    def batches(self, start: int) -> Iterator[list[Micro]]:
        """Batches from step `start` on; must not depend on interruptions."""
        ...

    def loss(self, micro: Micro) -> torch.Tensor:
        """Share of a micro-batch in the mean loss of its step, in nats per weighted token."""
        ...

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by name."""
        ...


@dataclass(frozen=True)
class LoopOptions:
    """Budget and learning rates of a run; it ends when max_steps or minutes is reached."""

    max_steps: int | None = None
    minutes: float | None = None
    matrix_rate: float = 0.02  # Muon, for hidden matrices
    other_rate: float = 0.004  # AdamW, for embeddings and vectors
    weight_decay: float = 0.02
    warmup_steps: int = 50
    decay_share: float = 0.5  # share of the budget, at its end, with a linear decay of the rate
    clip: float = 1.0  # maximum gradient norm
    checkpoint_minutes: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.max_steps and not self.minutes:
            raise ConfigError(
                "a run needs max_steps or minutes above zero, got neither; e.g. minutes=60"
            )


@dataclass
class Progress:
    """Counts of a run so far."""

    step: int = 0
    seconds: float = 0.0  # of training, including interrupted runs
    tokens: int = 0
    loss: float = float("nan")  # moving average over about 50 steps
    finished: bool = False
    history: list[tuple[int, float, float]] = field(default_factory=list)  # step, seconds, loss

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def share(self, max_steps: int | None, minutes: float | None) -> float:
        """The used share of a budget with a limit of steps, of minutes, or both."""
        shares = [self.step / max_steps] if max_steps else []
        shares += [self.seconds / (60 * minutes)] if minutes else []
        return max(shares)

    def add(self, loss: float, tokens: int, seconds: float) -> None:
        """Counts one finished step."""
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        self.seconds += seconds
        self.loss = loss if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * loss
        if self.step % 50 == 0:
            self.history.append((self.step, self.seconds, self.loss))


class Loop:
    """Trains until the budget is spent, with a checkpoint every few minutes."""

    def __init__(
        self,
        recipe: Trainable,
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

    def run(self) -> Progress:
        """Trains to the end of the budget; on Ctrl-C saves, then raises KeyboardInterrupt."""
        saved = time.monotonic()
        batches = self.recipe.batches(self.progress.step)
        try:
            while (spent := agree(self.spent())) < 1:
                start = time.monotonic()
                micros = next(batches)  # an on-policy batch is generated now
                self.progress.seconds += time.monotonic() - start
                self.step(micros, spent)
                if self.on_step:
                    self.on_step(self.progress)
                if time.monotonic() - saved > 60 * self.options.checkpoint_minutes:
                    self.save()
                    saved = time.monotonic()
        except KeyboardInterrupt:
            self.save()
            raise
        self.progress.finished = True
        self.save()
        return self.progress

    def step(self, micros: list[Micro], spent: float) -> None:
        """One step: gradients, then the update. spent: share of the budget before it.

        Ctrl-C during the gradients drops the step; a resumed run repeats it exactly, since its
        randomness depends on seed and step number only. Ctrl-C during the update takes effect after
        it, because all optimizers and the step count must change together.
        """
        start = time.monotonic()
        torch.manual_seed(self.options.seed * 1_000_003 + self.progress.step)
        loss = self.gradients(micros)
        factor = rate_factor(self.progress.step, spent, self.options)
        set_rates(self.optimizers, self.base_rates, factor)
        with delayed_interrupt():
            for optimizer in self.optimizers:
                optimizer.step()
            tokens = sum(micro.num_tokens for micro in micros)
            self.progress.add(loss, tokens, time.monotonic() - start)

    def gradients(self, micros: list[Micro]) -> float:
        """Computes the clipped gradients of a step; returns its loss.

        Raises Diverged if the loss or a gradient is not finite.
        """
        total = torch.zeros(1)
        for p in self.parameters.values():
            p.grad = None
        for micro in my_share(micros):
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = self.recipe.loss(micro.to(self.device))
            loss.backward()
            total += float(loss.detach())
        if is_in_group():  # a process without a share of the step still takes part in the sum
            for p in self.parameters.values():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        sum_gradients(total, self.parameters.values())
        if not math.isfinite(total):
            raise Diverged(
                f"loss became {float(total)} at step {self.progress.step};"
                " try a lower learning rate"
            )
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.options.clip)
        if not math.isfinite(norm):
            raise Diverged(
                f"a gradient became {float(norm)} at step {self.progress.step};"
                " try a lower learning rate"
            )
        return float(total)

    def spent(self) -> float:
        """Share of the budget that is used up."""
        return self.progress.share(self.options.max_steps, self.options.minutes)

    def save(self) -> None:
        """Writes the checkpoint, if it has a path (first process only).

        Raises Diverged if weights are not finite; the earlier checkpoint stays.
        """
        if not all(bool(p.isfinite().all()) for p in self.parameters.values()):
            raise Diverged(
                f"weights are not finite after step {self.progress.step}; try a lower learning rate"
            )
        if self.checkpoint is not None and is_first_process():
            save_checkpoint(self.checkpoint, self.parameters, self.optimizers, vars(self.progress))

    def resume(self) -> bool:
        """Restores the checkpoint; False if there is none. Raises DataError."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return False
        found = restore_checkpoint(self.checkpoint, self.parameters, self.optimizers)
        self.progress = Progress(**found | {"finished": False})
        return True
