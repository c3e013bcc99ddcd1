"""Conversations: earlier turns are given, the model writes the last answer.

In `recall` the last question asks for a number from the first turn; in `edit` the answer is a plan
with one line changed. Score: 1.0 for the right number; the share of the plan's words that agree in
order. The embedded reasoner cannot do this; its scores mean nothing.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from forerun.errors import ConfigError

from ._prose import DOINGS, GROUPS, PLACES, QUALITIES, THINGS, similarity
from ._reasoning_words import PEOPLE
from .base import Example, Generated, plain_text

HOURS = range(8, 20)
_NUMBER = re.compile(r"(?<![\d:])\d+(?![\d:])")
CHATTER = (
    ("Which of the {things} should I bring?", "The {quality} ones, if there is room for them."),
    ("Who else could help at {place}?", "Ask {group}; they know {place} well."),
    (
        "Is it far from {place} to {other}?",
        "Not very. Most people walk it with {quality} {things}.",
    ),
    ("What if it rains?", "Then meet at {place} and wait. The {things} can get wet."),
    ("Should I tell {group}?", "Yes, and {name} as well, so that nobody waits at {other}."),
)


@dataclass
class Day:
    """A plan: who, when, what, where."""

    rng: random.Random
    lines: list[list[str]]  # hour, name, doing, place

    def text(self) -> str:
        """One line per entry."""
        return "\n".join(
            f"{h}:00 - {name}: {doing} at {place}" for h, name, doing, place in self.lines
        )

    def change(self) -> str:
        """Changes one entry; returns a sentence about the change."""
        line = self.rng.choice(self.lines)
        what = self.rng.randrange(1, 4)
        line[what] = self.rng.choice([x for x in CHOICES[what - 1] if x != line[what]])
        return f"At {line[0]}:00 it should be {line[1]}: {line[2]} at {line[3]}."


CHOICES = (PEOPLE, DOINGS, PLACES)


class ConversationTask(Generated):
    """Conversations with `exchanges` earlier exchanges; plans of `lines` lines."""

    def __init__(
        self, *, exchanges: int = 3, lines: int = 8, seed: int = 0, size: int = 1000
    ) -> None:
        super().__init__(seed=seed, size=size)
        if exchanges < 1:
            raise ConfigError(f"exchanges must be at least 1, got {exchanges}")
        if not 2 <= lines <= len(HOURS):
            raise ConfigError(f"lines must be 2 to {len(HOURS)}, got {lines}")
        self.exchanges, self.lines = exchanges, lines

    def make(self, i: int, rng: random.Random) -> Example:
        """Categories alternate: recall, edit."""
        kind = ("recall", "edit")[i % 2]
        turns, answer = (self._recall if i % 2 == 0 else self._edit)(rng)
        return Example(
            "", plain_text(turns), answer, reference=answer, category=kind, turns=tuple(turns)
        )

    def score(self, example: Example, text: str) -> float:
        """1.0 for the right number, or the share of the plan that agrees."""
        if example.category == "edit":
            return similarity(text, example.answer)
        return float(self.read(text) == example.answer)

    def read(self, text: str) -> str | None:
        """The first number in the text that is not part of a time."""
        match = _NUMBER.search(text)
        return match.group() if match else None

    def _recall(self, rng: random.Random) -> tuple[list[str], str]:
        budget, seats = rng.randint(100, 990), rng.randint(10, 99)
        name, place, things = rng.choice(PEOPLE), rng.choice(PLACES), rng.choice(THINGS)
        first = (
            f"I am {name}. I have {budget} dollars for {things} and {seats} chairs to bring to "
            f"{place}. Can you help me with the day?"
        )
        reply = f"Gladly, {name}. Tell me what you want to know about the day at {place}."
        turns = [first, reply]
        for question, answer in self._chatter(rng, self.exchanges - 1):
            turns += [question, answer]
        asked = (
            (f"how many dollars do I have for {things}", budget),
            ("how many chairs do I bring", seats),
        )
        about, number = rng.choice(asked)
        return [*turns, f"Remind me: {about}? Answer with the number alone."], str(number)

    def _edit(self, rng: random.Random) -> tuple[list[str], str]:
        hours = sorted(rng.sample(HOURS, self.lines))
        plan = Day(rng, [[str(h), *map(rng.choice, CHOICES)] for h in hours])
        turns = [f"Make a plan of the day for {', '.join(sorted({x[1] for x in plan.lines}))}."]
        turns.append(plan.text())
        for _ in range(self.exchanges - 1):
            turns += [f"{plan.change()} Write the whole plan again.", plan.text()]
        turns.append(f"{plan.change()} Write the whole plan again, and nothing else.")
        return turns, plan.text()

    def _chatter(self, rng: random.Random, num: int) -> list[tuple[str, str]]:
        pairs = []
        for k in range(num):
            question, answer = CHATTER[k % len(CHATTER)]
            slots = {
                "things": rng.choice(THINGS),
                "quality": rng.choice(QUALITIES),
                "place": rng.choice(PLACES),
                "other": rng.choice(PLACES),
                "group": rng.choice(GROUPS),
                "name": rng.choice(PEOPLE),
            }
            pairs.append((question.format(**slots), answer.format(**slots)))
        return pairs
