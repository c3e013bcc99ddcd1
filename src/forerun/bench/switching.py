"""What switching between two models is worth: its score, its cost, and switching at random.

The control that "Entropy Adaptive Decoding" (Simonds 2025) needs: turns as often and as long as
those that entropy called for, and blind to the text. Whatever it scores, compute alone has bought.
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
class Turns:
    """How often each model (small, large) was asked where it could hand over, and did."""

    asked: list[int] = field(default_factory=lambda: [0, 0])
    turned: list[int] = field(default_factory=lambda: [0, 0])

    def rate(self, which: int) -> float:
        """Share of the times at which a model handed over."""
        return self.turned[which] / max(self.asked[which], 1)


class RandomSwitch(EntropySwitch):
    """Hands over with the rates of `like`, whatever the entropies are. Plain decoding only."""

    def __init__(
        self, small: Runner, large: Runner, like: Turns, *, hold: int = 0, seed: int = 0
    ) -> None:
        super().__init__(large, small=small, threshold=0.0, hold=hold)
        self.like, self.rng = like, np.random.default_rng(seed)

    def wanted(self, mode: Mode, window: tuple[float, ...]) -> int:
        """The other model, now and then."""
        turns = self.rng.random() < self.like.rate(mode.active)
        return LARGE + SMALL - mode.active if turns else mode.active


@dataclass
class Score:
    """What one way to switch did on some problems."""

    right: np.ndarray  # bool [n], by problem
    usage: Usage
    turns: Turns

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
    switch.usage, turns = Usage(), Turns()

    def hear(step: Step) -> None:
        for law in step.laws:
            rows: Any = law.rows
            mode, after = rows.mode(-1), rows.after(-1)
            if not switch.is_held(mode):
                turns.asked[mode.active] += 1
                turns.turned[mode.active] += after.active != mode.active

    given: dict[str, Any] = {"temperature": 0, "drafter": "none"} | options
    prompts = [example.prompt for example in examples]
    results = Model(switch, tokenizer).generate(
        prompts, batch=batch, on_step=hear, max_new_tokens=max_new_tokens, **given
    )
    right = [task.score(e, r.text) == 1.0 for e, r in zip(examples, results, strict=True)]
    return Score(np.array(right), switch.usage, turns)


def gap(one: Score, other: Score) -> tuple[float, float]:
    """Accuracy of one less that of the other on the same problems, and its standard error."""
    differences = one.right.astype(float) - other.right
    return float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(len(differences)))


def traces(
    models: Many[Runner], tokenizer: Tokenizer, examples: Many[Example]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Along each reference solution: entropies of the first model, and where the two disagree.

    Bits [n] and bool [n]: their likeliest next tokens differ.
    """
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
