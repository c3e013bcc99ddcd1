"""Stories of the reasoning task: a graph of quantities and its sentences."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from ._reasoning_words import FRACTIONS, Setting, capital, number, vary


@dataclass(frozen=True)
class Node:
    """One quantity: given in the text (`op` empty) or computed from earlier ones."""

    value: int
    op: str = ""  # "", "+", "-", "*", "/"
    args: tuple[int, ...] = ()  # operand values, in order
    needs: tuple[int, ...] = ()  # indices of the nodes among them
    claim: str = ""  # "Ann now has": what precedes the value
    label: str = ""  # "Ann": heads a bare computation
    why: str = ""  # a clause that gives the reason
    unit: str = ""

    @property
    def num_steps(self) -> int:
        """Number of binary operations of the node."""
        return max(0, len(self.args) - 1)


@dataclass(frozen=True)
class Shape:
    """Size of a level: steps, people or places, largest value."""

    steps: tuple[int, int]
    subjects: tuple[int, int]
    cap: int


LEVELS: dict[int, Shape] = {
    1: Shape((1, 2), (2, 2), 80),
    2: Shape((3, 4), (2, 3), 150),
    3: Shape((5, 6), (2, 4), 400),
    4: Shape((7, 8), (3, 4), 999),
    5: Shape((9, 10), (3, 5), 2500),
    6: Shape((11, 13), (4, 6), 9999),
}
MIX = (1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5, 6)  # levels in turn: short problems are more frequent


@dataclass
class Story:
    """A problem under construction: nodes, their subjects, and the sentences so far."""

    rng: random.Random
    setting: Setting
    unit: str
    subjects: list[str]
    cap: int
    nodes: list[Node] = field(default_factory=list)
    current: dict[str, int] = field(default_factory=dict)  # subject -> node
    facts: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    question: str = ""
    goal: int = -1

    def add(self, node: Node) -> int:
        """Adds a node; returns its index."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def value(self, subject: str) -> int:
        """The subject's quantity at this point of the story."""
        return self.nodes[self.current[subject]].value

    def say(self, template: str, **slots: object) -> str:
        """A sentence with this story's verbs and unit."""
        s = self.setting
        words = {"u": self.unit, "v": s.verb, "base": s.base, "aux": s.aux, "now": s.now}
        return capital(vary(self.rng, template, **words | slots))

    def clause(self, template: str, **slots: object) -> str:
        """Alternatives with slots filled; the solution's writer chooses one."""
        words = {"u": self.unit, "v": self.setting.verb, "now": self.setting.now}
        return template.format(**words | slots)

    def needed(self) -> list[int]:
        """Indices of the nodes that the goal needs, with the goal, in order."""
        seen, stack = set(), [self.goal]
        while stack:
            i = stack.pop()
            if i not in seen:
                seen.add(i)
                stack.extend(self.nodes[i].needs)
        return sorted(seen)

    def num_steps(self) -> int:
        """Number of operations of the answer."""
        return sum(self.nodes[i].num_steps for i in self.needed())


def draw_divisor(story: Story, value: int) -> int | None:
    choices = [k for k in FRACTIONS if value % k == 0 and value // k >= 2]
    return story.rng.choice(choices) if choices else None


def draw_groups(story: Story) -> tuple[int, int]:
    k = story.rng.randint(2, 9)
    if story.cap > 900 and story.rng.random() < 0.4:
        k = story.rng.randint(11, 25)
    return k, number(story.rng, 3, max(4, min(99, story.cap // (2 * k))))
