"""Needle in a haystack: find the number in one line of a long text.

Lengths are in characters, because tokenizers differ: a token has 3 to 5 characters for most models,
2 for the embedded reasoner. Other lines have other numbers. Score: 1.0 if the first number of five
digits in the answer is right. The embedded reasoner cannot do this; its scores mean nothing.
"""

from __future__ import annotations

import random
import re

from forerun.errors import ConfigError

from ._prose import PLACES, REPORT, Scene
from .base import Example, Generated, plain_text

LENGTHS = (1000, 4000, 16000, 64000)
MIN_CHARACTERS = 600
_NUMBER = re.compile(r"(?<![\d,.])\d{5}(?![\d,.]\d|\d)")


class NeedlesTask(Generated):
    """Prompts with alternating lengths, exact to a sentence; the line is at a random depth."""

    is_pass_fail = True

    def __init__(
        self,
        *,
        lengths: tuple[int, ...] = LENGTHS,
        others: int = 2,
        seed: int = 0,
        size: int = 1000,
    ) -> None:
        super().__init__(seed=seed, size=size)
        if not lengths or min(lengths) < MIN_CHARACTERS:
            raise ConfigError(
                f"lengths must be at least {MIN_CHARACTERS} characters, got {lengths}"
            )
        if not 0 <= others < len(PLACES):
            raise ConfigError(f"others must be 0 to {len(PLACES) - 1}, got {others}")
        if 100 * others > min(lengths) - MIN_CHARACTERS // 2:
            raise ConfigError(f"{others} other lines do not fit into {min(lengths)} characters")
        self.lengths, self.others = lengths, others

    def make(self, i: int, rng: random.Random) -> Example:
        """The category is the length."""
        length = self.lengths[i % len(self.lengths)]
        places = rng.sample(PLACES, self.others + 1)
        numbers = [str(n) for n in rng.sample(range(10000, 100000), self.others + 1)]
        lines = [f"The secret number of {p} is {n}." for p, n in zip(places, numbers, strict=True)]
        task = f"What is the secret number of {places[0]}? Answer with the number alone."
        head = "Somewhere in this text a few secret numbers are told.\n\n"
        room = length - len(head) - len(task) - sum(map(len, lines)) - 3 * len(lines)
        sentences = Scene(rng, REPORT).text(room).split(". ")
        for line in lines:
            sentences.insert(rng.randrange(len(sentences)), line.removesuffix("."))
        turns = (f"{head}{'. '.join(sentences)}\n\n{task}",)
        return Example(
            "",
            plain_text(turns),
            numbers[0],
            level=length,
            reference=numbers[0],
            category=f"{length} characters",
            turns=turns,
        )

    def score(self, example: Example, text: str) -> float:
        """1.0 if the first number of five digits is right."""
        return float(self.read(text) == example.answer)

    def read(self, text: str) -> str | None:
        """The first number of five digits."""
        match = _NUMBER.search(text)
        return match.group() if match else None
