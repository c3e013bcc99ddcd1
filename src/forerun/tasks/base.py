"""The Task role: numbered examples, what a model is shown of them, and a checker."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from forerun.errors import ConfigError

SPEAKERS = ("User: {}", "Assistant: {}")  # where a model has no chat template
SPARE = 128  # tokens of the context that made-up answers leave


@dataclass(frozen=True)
class Example:
    """One problem: what the model is shown, and what a right solution ends in."""

    id: str
    prompt: str  # as a model without a chat template is shown it
    answer: str
    level: int = 0
    reference: str = ""
    category: str = ""
    turns: tuple[str, ...] = ()  # user, model, ..., user; "" is an answer that is still to come
    after: tuple[int, ...] = ()  # indices of the examples whose answers those are, in order
    source: str = ""  # the problem as its file has it, without instructions of ours

    @property
    def label(self) -> str:
        """Category, or else level: by which reports group."""
        return self.category or str(self.level)


@runtime_checkable
class Task(Protocol):
    """Examples by index, always the same ones, and a score in [0, 1] for a written solution.

    A task may also have `is_pass_fail`, whether all scores are 0 or 1, and `stratum(example)`, the
    category by which suites choose evenly.
    """

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def example(self, i: int) -> Example:
        """The i-th example."""
        ...

    def score(self, example: Example, text: str) -> float | None:
        """1.0 where the text solves the example, 0.0 where not, between for partial credit.

        None where nobody can say.
        """
        ...

    def read(self, text: str) -> str | None:
        """The final answer that a text states, for votes among samples; None where there is none.

        What is scored 1.0 is read as the example's `answer` in tasks that have such answers.
        """
        ...


class Generated(ABC):
    """A task whose examples are drawn by our own code from a seed and an index."""

    def __init__(self, *, seed: int = 0, size: int = 1000) -> None:
        if size < 1:
            raise ConfigError(f"size must be at least 1, got {size}")
        self.seed, self.size = seed, size

    def __len__(self) -> int:
        """Number of examples that indices may name."""
        return self.size

    def example(self, i: int) -> Example:
        """The i-th example."""
        if not 0 <= i < self.size:
            raise IndexError(f"example {i} of a task of {self.size}")
        name = type(self).__module__.rpartition(".")[2]
        key = f"{name}/{self.seed}/{i}"
        rng = random.Random(hashlib.sha256(key.encode()).digest())
        return replace(self.make(i, rng), id=f"{name}-{self.seed}-{i}")

    @abstractmethod
    def make(self, i: int, rng: random.Random) -> Example:
        """The i-th example, all choices by `rng`; the id is set by the caller."""

    def read(self, text: str) -> str | None:
        """No final answer to vote on."""
        return None


def prepare(example: Example, tokenizer: Any, answers: Sequence[str] = ()) -> Example:
    """The example with the prompt that a model with this tokenizer is shown.

    Empty turns become `answers` in order, stripped. Turns are written in the tokenizer's chat
    template where it has one; without one, and for an example without turns, the prompt is plain.
    """
    if not example.turns:
        return example
    left = iter(answers)
    turns = tuple(turn or next(left, "").strip() for turn in example.turns)
    if tokenizer.has_chat_template:
        return replace(example, turns=turns, prompt=chat_text(tokenizer, turns))
    prompt = example.prompt if turns == example.turns else plain_text(turns)
    return replace(example, turns=turns, prompt=prompt)


def made_up_answers(example: Example, tokenizer: Any, context: int, longest: int) -> list[str]:
    """One for every answer that a prepared example builds on, of its own words.

    Each of `longest` tokens, or what a context of so many has room for.
    """
    ids, after = tokenizer.encode(example.prompt), len(example.after)
    num = max(0, min(longest, (context - len(ids) - SPARE) // after))
    return [tokenizer.decode((ids * (num // len(ids) + 1))[:num])] * after


def plain_text(turns: Sequence[str]) -> str:
    """A conversation without a template; a single turn is just its text and a line break."""
    if len(turns) == 1:
        return turns[0] + "\n"
    lines = [SPEAKERS[i % 2].format(turn) for i, turn in enumerate(turns)]
    return "\n\n".join([*lines, "Assistant:"])


def chat_text(tokenizer: Any, turns: Sequence[str]) -> str:
    """The text whose ids, as a plain prompt is encoded, are those of the chat template.

    Templates write the first special token that encoding adds again; it is left out here.
    """
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    wanted = tokenizer.chat(messages)
    text = tokenizer.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    first = getattr(tokenizer.inner, "bos_token", None) or ""
    shorter = text.removeprefix(first)
    return shorter if tokenizer.encode(shorter) == wanted else text
