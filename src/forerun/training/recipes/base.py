"""What recipes share: options, plan, progress, and the run of those that the loop trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from forerun.training import plans
from forerun.training.data import Micro
from forerun.training.loop import Loop, LoopOptions, Progress
from forerun.training.progress import Watch, silent, step_note


@dataclass(kw_only=True, eq=False)
class Recipe(ABC):
    """What `forerun train NAME` runs. One module of `recipes/` holds one recipe.

    Options are the keyword-only arguments of the constructor. Each is kept as an attribute of its
    name, and described in the class docstring by a line `name: text.` From these the command line
    and `plan.json` are built.

    seed: decides data, initial weights and order.
    """

    may_change: ClassVar[frozenset[str]] = frozenset()  # options that a resumed run may change
    can_resume: ClassVar[bool] = True  # whether `train` takes `resume`

    seed: int = 0

    @abstractmethod
    def train(self, out: Path, *, resume: bool = False, watch: Watch = silent) -> list[str]:
        """Makes in `out` what the recipe makes; returns lines that report it.

        resume: continue the run in `out`. Raises ConfigError where that run had other settings.
        """

    def fixed(self) -> dict[str, Any]:
        """What else a run keeps to its end: constants of the recipe. Part of plan.json."""
        return {}


@dataclass(kw_only=True, eq=False)
class LoopRecipe(Recipe):
    """A recipe that `Loop` trains by gradient steps.

    minutes: training time, at most.
    max_steps: training steps, at most.
    """

    may_change: ClassVar[frozenset[str]] = frozenset({"minutes", "max_steps"})
    checkpoint: ClassVar[str] = "checkpoint.pt"  # file in `out`

    minutes: float | None = None
    max_steps: int | None = None

    @abstractmethod
    def prepare(self, out: Path, watch: Watch) -> None:
        """Makes data and models, or loads those of an earlier sitting."""

    @abstractmethod
    def batches(self, start: int) -> Iterator[list[Micro]]:
        """Steps of micro-batches from number `start` on, the same after a resume."""

    @abstractmethod
    def loss(self, micro: Micro) -> torch.Tensor:
        """The micro-batch's share of the step's mean loss."""

    @abstractmethod
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by name."""

    @abstractmethod
    def save(self, out: Path) -> None:
        """Writes what was trained."""

    def loop_options(self) -> LoopOptions:
        """Budget and rates."""
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
