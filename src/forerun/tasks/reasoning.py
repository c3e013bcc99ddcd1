"""The reasoning task: generated word problems, written-out solutions, an exact checker."""

from __future__ import annotations

import hashlib
import random
import re

from forerun.assets import PROBLEM
from forerun.errors import ConfigError

from ._reasoning_events import happen
from ._reasoning_facts import introduce
from ._reasoning_questions import ask
from ._reasoning_text import write_solution
from ._reasoning_words import SETTINGS
from ._reasoning_world import LEVELS, MIX, Shape, Story
from .base import Example

SPLITS = ("train", "heldout")
_ANSWER = re.compile(r"^Answer: (-?\d+)[ \t]*$", re.MULTILINE)


class ReasoningTask:
    """Word problems of levels 1 to 6, determined by split, seed and index."""

    is_pass_fail = True

    def __init__(
        self,
        split: str = "train",
        levels: tuple[int, ...] = MIX,
        seed: int = 0,
        size: int = 1_000_000,
    ) -> None:
        if split not in SPLITS:
            raise ConfigError(
                f"split must be one of {', '.join(SPLITS)}, got '{split}'; try 'heldout'"
            )
        if not levels or set(levels) - set(LEVELS):
            raise ConfigError(
                f"levels must be some of 1 to {max(LEVELS)}, got {levels}; e.g. levels=(1, 2, 3)"
            )
        self.split, self.levels, self.seed, self.size = split, tuple(levels), seed, size

    def __len__(self) -> int:
        """Number of examples."""
        return self.size

    def example(self, i: int) -> Example:
        """The i-th problem; levels alternate."""
        if not 0 <= i < self.size:
            raise IndexError(f"example {i} of a task of {self.size}")
        level = self.levels[i % len(self.levels)]
        story = build(self._rng(i, "problem"), level)
        name = f"{self.split}-{self.seed}-{i}"
        answer = story.nodes[story.goal].value
        return Example(
            name,
            prompt(story),
            str(answer),
            level,
            write_solution(story, self._rng(i, "solution0")),
        )

    def solution(self, i: int, variant: int = 0) -> str:
        """Another way to write the i-th solution; variant 0 is the example's reference."""
        story = build(self._rng(i, "problem"), self.levels[i % len(self.levels)])
        return write_solution(story, self._rng(i, f"solution{variant}"))

    def score(self, example: Example, text: str) -> float:
        """1.0 if the last answer line of the text is the example's answer, otherwise 0.0."""
        return float(read_answer(text) == example.answer)

    def read(self, text: str) -> str | None:
        """The number on the last answer line."""
        return read_answer(text)

    def _rng(self, i: int, what: str) -> random.Random:
        key = f"reasoning/{self.split}/{self.seed}/{i}/{what}"
        return random.Random(hashlib.sha256(key.encode()).digest())


def build(rng: random.Random, level: int) -> Story:
    """A story with a question that takes as many steps as the level requires."""
    shape = LEVELS[level]
    while True:
        story = _start(rng, shape)
        introduce(story, level)
        happen(story, shape)
        ask(story, shape)
        if shape.steps[0] <= story.num_steps() <= shape.steps[1]:
            return story


def _start(rng: random.Random, shape: Shape) -> Story:
    setting = rng.choice(SETTINGS)
    subjects = rng.sample(setting.subjects, rng.randint(*shape.subjects))
    return Story(rng, setting, rng.choice(setting.units), subjects, shape.cap)


def prompt(story: Story) -> str:
    """The prompt of a problem; the last line break is a separate token."""
    return PROBLEM.format(text=" ".join([*story.facts, *story.events, story.question]))


def read_answer(text: str) -> str | None:
    """The number on the last `Answer: N` line, without leading zeros; None if there is none."""
    found = _ANSWER.findall(text)
    return str(int(found[-1])) if found else None
