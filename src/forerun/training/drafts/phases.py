"""The phases of a draft's training: data, budget and learning rates of each, and its run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from forerun.errors import Diverged
from forerun.training.data.documents import Batches
from forerun.training.data.mixture import Mixture
from forerun.training.drafts.data import DraftData
from forerun.training.drafts.distillation import TEXT, Best, Distilled, divergence
from forerun.training.loop import Loop, LoopOptions, Progress
from forerun.training.processes import is_first_process
from forerun.training.progress import Watch, step_note

CODE_SHARE = 2 / 3  # of tokens in continued training
EVALUATIONS = 8  # of held-out acceptance per phase
EVALUATED_SHARE = 0.2  # of training time, without max_steps; the first and last always run
RATES = {"pretrain": 1.0, "continue": 0.3, "align": 0.3}  # factors of learning rates
PROBE_SHARE = 0.05  # of the minutes, for each shape at most
MIN_PHASE_SHARE = 1e-6  # of the budget, if earlier phases used all of it
TWO, THREE = (0.5, 0.5), (0.45, 0.2, 0.35)  # shares of the budget


class Phase(NamedTuple):
    """A phase of training."""

    name: str
    share: float  # of the budget
    data: Any  # batches
    loss: str


@dataclass(frozen=True)
class Budget:
    """Steps or minutes of all phases, and learning rates."""

    max_steps: int | None = None
    minutes: float | None = None
    rate: float = 1.0  # factor of all learning rates
    seed: int = 0

    def options(self, phase: Phase) -> LoopOptions:
        """Budget and learning rates of a phase."""
        steps, minutes, share = self.max_steps, self.minutes, phase.share
        base, factor = LoopOptions(max_steps=1), self.rate * RATES[phase.name]
        return replace(
            base,
            max_steps=None if steps is None else max(1, round(share * steps)),
            minutes=None if minutes is None else share * minutes,
            matrix_rate=factor * base.matrix_rate,
            other_rate=factor * base.other_rate,
            seed=self.seed,
        )

    def probe(self, steps: int) -> LoopOptions:
        """Budget of the short training before a shape is judged: steps, or a share of the time."""
        minutes = None if self.minutes is None else PROBE_SHARE * self.minutes
        return LoopOptions(max_steps=steps, minutes=minutes, warmup_steps=5, seed=self.seed)


@dataclass(frozen=True)
class Texts:
    """What the phases learn: running text, code, and a kind of answers with its loss."""

    corpus: Path | None
    code: Path | None
    data: str = "target"
    loss: str = "ce"
    text_share: float = 0.0  # of running text in the alignment

    def phases(self, material: DraftData, model: PreTrainedModel) -> list[Phase]:
        """Pre-training on text, continued training with code, alignment on answers."""
        aligned: Any = material.alignment(self.data, model)
        if self.text_share and isinstance(aligned, Batches):
            sources = {"answers": aligned, TEXT: material.text(self.corpus)}
            shares = {"answers": 1 - self.text_share, TEXT: self.text_share}
            aligned = Mixture(sources, shares, material.micro_batches)
        first, last = material.text(self.corpus), Phase("align", TWO[1], aligned, self.loss)
        if self.code is None:
            return [Phase("pretrain", TWO[0], first, "ce"), last]
        sources = {"code": material.text(self.code), TEXT: material.text(self.corpus)}
        shares = {"code": CODE_SHARE, TEXT: 1 - CODE_SHARE}
        mixed = Mixture(sources, shares, material.micro_batches)
        return [
            Phase("pretrain", THREE[0], first, "ce"),
            Phase("continue", THREE[1], mixed, "ce"),
            last._replace(share=THREE[2]),
        ]


@dataclass
class Trainer:
    """Trains a draft phase by phase; keeps the weights with the best held-out acceptance."""

    model: PreTrainedModel
    teacher: Any
    material: DraftData
    budget: Budget
    state: Path  # folder of checkpoints
    device: torch.device = torch.device("cpu")
    rates: dict[str, dict[str, float]] = field(default_factory=dict)  # at the end of a phase

    def __post_init__(self) -> None:
        self.best = Best(self.state)
        torch.nn.Module.to(self.model, self.device)

    def acceptance(self) -> dict[str, float]:
        """Held-out acceptance, all and by domain."""
        return self.material.acceptance(self.model, self.teacher)

    def run_all(self, phases: Sequence[Phase], watch: Watch) -> Iterator[tuple[Phase, Progress]]:
        """Trains the phases in turn; yields each with its progress.

        The budget that earlier phases left is divided among the remaining phases by their shares.
        In a resumed run, phases before the last one that has begun are not trained again, so added
        budget goes to that phase and those after it.
        """
        begun = [i for i, phase in enumerate(phases) if self.checkpoint(phase).exists()]
        left = 1.0
        for i, phase in enumerate(phases):
            part = phase.share / sum(later.share for later in phases[i:])
            resized = phase._replace(share=max(part * left, MIN_PHASE_SHARE))
            progress = self.run(resized, watch, is_over=i < max(begun, default=0))
            left -= progress.share(self.budget.max_steps, self.budget.minutes)
            yield phase, progress

    def checkpoint(self, phase: Phase) -> Path:
        """The checkpoint file of a phase."""
        return self.state / f"{phase.name}.pt"

    def run(self, phase: Phase, watch: Watch, *, is_over: bool = False) -> Progress:
        """Trains a phase to the end of its budget, from its checkpoint if it has one.

        All processes of a group take part; the first one evaluates and writes. is_over: the weights
        of the checkpoint are loaded, and not trained.
        """
        trained = Distilled(self.model, phase.data, divergence(phase.loss), self.teacher)
        options, path = self.budget.options(phase), self.checkpoint(phase)
        loop = Loop(trained, options, self.device, path)
        if loop.resume() and is_over:
            return loop.progress
        marks, due = int(loop.spent() * EVALUATIONS), 0.0

        def look(progress: Progress) -> None:
            nonlocal marks, due
            spent = min(1.0, loop.spent())
            is_due = progress.seconds >= due or spent == 1.0
            if self.budget.max_steps is not None:  # time must not decide which weights are kept
                is_due = True
            if is_due and int(spent * EVALUATIONS) > marks:
                start, marks = perf_counter(), int(spent * EVALUATIONS)
                watch(phase.name, spent, "evaluating")
                rates = self.acceptance()
                self.best.offer(self.model, phase.name, progress.step, rates)
                if spent == 1.0:
                    self.rates[phase.name] = rates
                due = progress.seconds + (perf_counter() - start) / EVALUATED_SHARE
            watch(phase.name, *step_note(progress, spent))

        loop.on_step = look if is_first_process() else None
        begins = not loop.progress.step
        try:
            return loop.run()
        except Diverged as error:
            raise Diverged(f"phase {phase.name}: {error}{self.advice(phase, begins)}") from error

    def advice(self, phase: Phase, begins: bool) -> str:
        """How to repeat earlier phases, if this one failed before its first checkpoint."""
        before = [path.name for path in self.state.glob("*.pt") if path != self.checkpoint(phase)]
        if not begins or not before:
            return ""
        return (
            f"; if that fails too, an earlier phase diverged: delete {self.state}/*.pt and "
            f"{self.state}/best*, and continue with --resume and the lower rate"
        )
