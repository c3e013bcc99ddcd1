"""Extractive summaries: list the marked sentences of a report.

Score: share of the sentences found word for word. The embedded reasoner cannot do this; its scores
mean nothing.
"""

from __future__ import annotations

import random

from forerun.errors import ConfigError

from ._prose import DOINGS, GROUPS, MONTHS, REPORT, Scene, found
from .base import Example, Generated, plain_text


class SummarisingTask(Generated):
    """Reports of `paragraphs` paragraphs: their first sentences, or the decisions in minutes."""

    def __init__(self, *, paragraphs: int = 5, seed: int = 0, size: int = 1000) -> None:
        super().__init__(seed=seed, size=size)
        if not 2 <= paragraphs <= len(DOINGS):
            raise ConfigError(f"paragraphs must be 2 to {len(DOINGS)}, got {paragraphs}")
        self.paragraphs = paragraphs

    def make(self, i: int, rng: random.Random) -> Example:
        """Categories alternate: leads, decisions."""
        kind = ("leads", "decisions")[i % 2]
        document, wanted, task = (_leads if i % 2 == 0 else _decisions)(rng, self.paragraphs)
        answer = "\n".join(wanted)
        turns = (f"{document}\n\n{task}",)
        return Example("", plain_text(turns), answer, reference=answer, category=kind, turns=turns)

    def score(self, example: Example, text: str) -> float:
        """Share of the wanted sentences in the text."""
        return found(text, example.answer.split("\n"))


def _leads(rng: random.Random, num: int) -> tuple[str, list[str], str]:
    scene = Scene(rng, REPORT)
    leads = [scene.sentence() for _ in range(num)]
    parts = [lead + " " + scene.paragraph(rng.randint(2, 4)) for lead in leads]
    task = (
        "Summarise this report by its first sentences: copy the first sentence of every paragraph "
        "word for word, one per line, and nothing else."
    )
    return "\n\n".join(parts), leads, task


def _decisions(rng: random.Random, num: int) -> tuple[str, list[str], str]:
    scene = Scene(rng, REPORT)
    chosen = zip(rng.sample(GROUPS, num), rng.sample(DOINGS, num), strict=True)
    wanted, parts = [], []
    for group, doing in chosen:
        decision = f"Decision: {group} will {doing} by {rng.choice(MONTHS)} {rng.randint(1, 28)}."
        wanted.append(decision)
        parts.append(scene.paragraph(rng.randint(1, 3)) + " " + decision)
        if rng.random() < 0.5:
            parts.append(scene.paragraph(rng.randint(2, 3)))
    task = (
        "List every decision of these minutes, each copied word for word with the word Decision, "
        "one per line, and nothing else."
    )
    return "\n\n".join(parts), wanted, task
