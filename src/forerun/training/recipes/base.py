"""Base classes of training recipes; `LoopRecipe` is trained by `training.loop`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from forerun.errors import ConfigError
from forerun.training import plans
from forerun.training.data.documents import Micro
from forerun.training.loop import Loop, LoopOptions, Progress
from forerun.training.progress import Watch, silent, step_note


@dataclass(kw_only=True, eq=False)
class Recipe(ABC):
    """A training recipe, run by `forerun train NAME`; one per module of `recipes/`.

    Options are the keyword-only arguments of the constructor. Each is an attribute of the same
    name, described in the class docstring by a line `name: text.` The command line and `plan.json`
    are built from them.

    seed: seed of data, initial weights and order.
    """

    may_change: ClassVar[frozenset[str]] = frozenset()  # options that a resumed run may change
    minimums: ClassVar[dict[str, float]] = {"seed": 0}  # smallest values of options
    can_resume: ClassVar[bool] = True  # whether `train` takes `resume`

    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for an option below its minimum."""
        for name, least in self.minimums.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")

    @abstractmethod
    def train(self, out: Path, *, resume: bool = False, watch: Watch = silent) -> list[str]:
        """Trains and writes the result into `out`; returns lines of a report.

        resume: continue the run in `out`. Raises ConfigError if that run had other settings.
        """

    def fixed(self) -> dict[str, Any]:
        """Constants of the recipe that must not change within a run; part of plan.json."""
        return {}


@dataclass(kw_only=True, eq=False)
class LoopRecipe(Recipe):
    """A recipe trained by gradient steps in `Loop`.

    minutes: maximum training time.
    max_steps: maximum number of training steps.
    """

    may_change: ClassVar[frozenset[str]] = frozenset({"minutes", "max_steps"})
    minimums = Recipe.minimums | {"minutes": 0.01, "max_steps": 1}
    checkpoint: ClassVar[str] = "checkpoint.pt"  # file in `out`

    minutes: float | None = None
    max_steps: int | None = None

    @abstractmethod
    def prepare(self, out: Path, watch: Watch) -> None:
        """Makes data and models, or loads those of an interrupted run."""

    @abstractmethod
    def batches(self, start: int) -> Iterator[list[Micro]]:
        """Steps of micro-batches from step `start` on; independent of interruptions."""

    @abstractmethod
    def loss(self, micro: Micro) -> torch.Tensor:
        """Share of a micro-batch in the mean loss of its step."""

    @abstractmethod
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by name."""

    @abstractmethod
    def save(self, out: Path) -> None:
        """Writes the trained model or head."""

    def loop_options(self) -> LoopOptions:
        """Budget and learning rates."""
        return LoopOptions(max_steps=self.max_steps, minutes=self.minutes, seed=self.seed)

    def report(self, out: Path, progress: Progress) -> list[str]:
        """Lines about the finished run."""
        return [f"{progress.step} steps, loss {progress.loss:.3f} -> {out}"]

    def train(self, out: Path, *, resume: bool = False, watch: Watch = silent) -> list[str]:
        checkpoint = out / self.checkpoint
        options = self.loop_options()  # raises ConfigError before anything is written
        plans.begin(out, self, is_trained=checkpoint.exists(), resume=resume)
        self.prepare(out, watch)
        loop = Loop(self, options, torch.device("cpu"), checkpoint)
        loop.on_step = lambda progress: watch("training", *step_note(progress, loop.spent()))
        loop.resume()
        progress = loop.run()
        self.save(out)
        return self.report(out, progress)
