"""Story: continue the beginning of a story.

There is no score. The task measures speed and acceptance on open text.
"""

from __future__ import annotations

import random

from forerun.errors import ConfigError

from ._prose import STORY, Scene
from .base import Example, Generated


class StoryTask(Generated):
    """Beginnings of at most `characters` characters, cut after a sentence."""

    def __init__(self, *, characters: int = 600, seed: int = 0, size: int = 1000) -> None:
        super().__init__(seed=seed, size=size)
        if characters < 200:
            raise ConfigError(f"characters must be at least 200, got {characters}")
        self.characters = characters

    def make(self, i: int, rng: random.Random) -> Example:
        """A beginning."""
        text = Scene(rng, STORY).text(self.characters)
        turns = (f"Here is the beginning of a story. Write on from where it stops.\n\n{text}",)
        return Example("", text, "", category="story", turns=turns)

    def score(self, example: Example, text: str) -> None:
        """None: open text has no score."""
        return None
