"""Copying: repeat a section of a document, unchanged or with a name replaced.

Score: share of the words that agree in order. The embedded reasoner cannot do this; its scores mean
nothing. Drafters that copy from the prompt work best here.
"""

from __future__ import annotations

import random
import re

from forerun.errors import ConfigError

from ._prose import REPORT, Scene, similarity
from ._reasoning_words import PEOPLE
from .base import Example, Generated, plain_text


class CopyingTask(Generated):
    """Documents of `sections` sections of `sentences` sentences each."""

    def __init__(
        self, *, sections: int = 4, sentences: int = 4, seed: int = 0, size: int = 1000
    ) -> None:
        super().__init__(seed=seed, size=size)
        if sections < 1 or sentences < 1:
            raise ConfigError(
                f"sections and sentences must be at least 1, got {sections} and {sentences}"
            )
        self.sections, self.sentences = sections, sentences

    def make(self, i: int, rng: random.Random) -> Example:
        """Categories alternate: verbatim, rename."""
        scene = Scene(rng, REPORT)
        parts = [scene.paragraph(self.sentences) for _ in range(self.sections)]
        k, kind = rng.randrange(self.sections), ("verbatim", "rename")[i % 2]
        old, new = scene.cast[0], rng.choice([n for n in PEOPLE if n not in scene.cast])
        name = re.compile(rf"\b{old}\b")
        if kind == "rename" and not name.search(parts[k]):
            parts[k] += f" {old} was told of it."
        document = "\n\n".join(f"Section {n}. {part}" for n, part in enumerate(parts, start=1))
        wanted = parts[k]
        task = f"Repeat section {k + 1} of this document word for word, without its number."
        if kind == "rename":
            wanted = name.sub(new, wanted)
            task += f" Only write {new} wherever it says {old}."
        turns = (f"{document}\n\n{task}",)
        return Example("", plain_text(turns), wanted, reference=wanted, category=kind, turns=turns)

    def score(self, example: Example, text: str) -> float:
        """Share of the words that agree in order."""
        return similarity(text, example.answer)
