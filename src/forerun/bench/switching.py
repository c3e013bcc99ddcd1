"""Accuracy and cost of switching between two models by entropy, against switching at random.

The control for "Entropy Adaptive Decoding" (Simonds 2025): random switches at the same rates, so
its accuracy is the effect of compute alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.api import Model
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence, Step
from forerun.core.sampling import Sampling
from forerun.core.tree import chain
from forerun.models.tokenizer import Tokenizer
from forerun.runner.model_runner import Runner
from forerun.targets.entropy_switch import LARGE, SMALL, EntropySwitch, Mode, Usage, entropy_bits
from forerun.tasks.base import Example, Task


@dataclass
class SwitchCounts:
    """For each model (small, large), the possible and the actual switches."""

    possible: list[int] = field(default_factory=lambda: [0, 0])
    switched: list[int] = field(default_factory=lambda: [0, 0])

    def rate(self, which: int) -> float:
        """Share of the possible switches that happened."""
        return self.switched[which] / max(self.possible[which], 1)


class RandomSwitch(EntropySwitch):
    """Switches at the rates of `like`, independent of entropies. Plain decoding only."""

    def __init__(
        self, small: Runner, large: Runner, like: SwitchCounts, *, hold: int = 0, seed: int = 0
    ) -> None:
        super().__init__(large, small=small, threshold=0.0, hold=hold)
        self.like, self.rng = like, np.random.default_rng(seed)

    def wanted(self, mode: Mode, window: tuple[float, ...]) -> int:
        """The other model, at its rate."""
        switches = self.rng.random() < self.like.rate(mode.active)
        return LARGE + SMALL - mode.active if switches else mode.active


@dataclass
class Score:
    """Results of one switching rule on some problems."""

    right: np.ndarray  # bool [n], by problem
    usage: Usage
    switches: SwitchCounts

    @property
    def accuracy(self) -> float:
        """Share of problems solved."""
        return float(self.right.mean())


def score(
    switch: EntropySwitch,
    tokenizer: Tokenizer,
    task: Task,
    examples: Many[Example],
    *,
    batch: int = 64,
    max_new_tokens: int = 300,
    **options: Any,
) -> Score:
    """Greedy texts of a switch on these problems. options: those of `Model.generate`."""
    switch.usage, switches = Usage(), SwitchCounts()

    def count(step: Step) -> None:
        for law in step.laws:
            rows: Any = law.rows
            mode, after = rows.mode(-1), rows.after(-1)
            if not switch.is_held(mode):
                switches.possible[mode.active] += 1
                switches.switched[mode.active] += after.active != mode.active

    given: dict[str, Any] = {"temperature": 0, "drafter": "none"} | options
    prompts = [example.prompt for example in examples]
    results = Model(switch, tokenizer).generate(
        prompts, batch=batch, on_step=count, max_new_tokens=max_new_tokens, **given
    )
    right = [task.score(e, r.text) == 1.0 for e, r in zip(examples, results, strict=True)]
    return Score(np.array(right), switch.usage, switches)


def gap(one: Score, other: Score) -> tuple[float, float]:
    """Difference in accuracy on the same problems, and its standard error."""
    differences = one.right.astype(float) - other.right
    return float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(len(differences)))


def traces(
    models: Many[Runner], tokenizer: Tokenizer, examples: Many[Example]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each reference solution: entropies of the first model in bits [n], and whether the most
    likely tokens of the two models differ, bool [n]."""
    found = []
    for example in examples:
        ids = tokenizer.encode(example.prompt)
        tokens = tokenizer.encode(example.prompt + example.reference)[len(ids) :]
        seq = Sequence(ids, len(ids), Sampling(), SeededDice(0), limit=len(tokens) + 1)
        rows = [m.forward(ForwardBatch([seq], [chain(tokens)]))[0].logits for m in models]
        for model in models:
            model.release(seq)
        size = min(row.shape[1] for row in rows)
        small, large = (row[:-1, :size].float().cpu().numpy() for row in rows)
        found.append(
            (np.array([entropy_bits(row) for row in small]), small.argmax(1) != large.argmax(1))
        )
    return found
