"""The Task role: numbered examples with prompts and a checker."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from forerun.errors import ConfigError
from forerun.models.chat_template import rendered

SPEAKERS = ("User: {}", "Assistant: {}")  # for models without a chat template
SPARE_TOKENS = 128  # of the context, not used by made-up answers


@dataclass(frozen=True)
class Example:
    """One problem: prompt and reference answer."""

    id: str
    prompt: str  # for a model without a chat template
    answer: str
    level: int = 0
    reference: str = ""
    category: str = ""
    turns: tuple[str, ...] = ()  # user, model, ..., user; "": an answer to be filled in
    after: tuple[int, ...] = ()  # indices of the examples that give those answers, in order
    source: str = ""  # the problem in its file, without added instructions

    @property
    def label(self) -> str:
        """Category, or level if there is none; reports group by it."""
        return self.category or str(self.level)


@runtime_checkable
class Task(Protocol):
    """Examples by index, always the same, and a score in [0, 1] for a text.

    A task may also have `is_pass_fail`, whether all scores are 0 or 1, `stratum(example)`, the
    category by which suites balance examples, and `has_answer(text)`, whether a text that the token
    limit cut can be scored nonetheless (else it scores as an empty text).
    """

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def example(self, i: int) -> Example:
        """The i-th example."""
        ...

    def score(self, example: Example, text: str) -> float | None:
        """1.0 if the text solves the example, otherwise 0.0, or a value between; None: no score."""
        ...

    def read(self, text: str) -> str | None:
        """The final answer in a text, for votes among samples; None if there is none.

        If the task has answers, a text with score 1.0 gives the example's `answer`.
        """
        ...


class Generated(ABC):
    """A task that generates its examples from a seed and an index."""

    def __init__(self, *, seed: int = 0, size: int = 1000) -> None:
        if size < 1:
            raise ConfigError(f"size must be at least 1, got {size}")
        self.seed, self.size = seed, size

    def __len__(self) -> int:
        """Number of examples."""
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
        """The i-th example, drawn with `rng`; the caller sets the id."""

    def read(self, text: str) -> str | None:
        """No final answer to vote on."""
        return None


def prepare(example: Example, tokenizer: Any, answers: Sequence[str] = ()) -> Example:
    """The example with its prompt for this tokenizer.

    `answers`, stripped, replace empty turns in order. Turns use the tokenizer's chat template;
    without one, and for an example without turns, the prompt is plain text.
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
    """An answer for every empty turn of a prepared example, made of the prompt's tokens.

    Each has `longest` tokens, or fewer if the context is too short.
    """
    ids, after = tokenizer.encode(example.prompt), len(example.after)
    num = max(0, min(longest, (context - len(ids) - SPARE_TOKENS) // after))
    return [tokenizer.decode((ids * (num // len(ids) + 1))[:num])] * after


def plain_text(turns: Sequence[str]) -> str:
    """A conversation without a template; a single turn is its text and a line break."""
    if len(turns) == 1:
        return turns[0] + "\n"
    lines = [SPEAKERS[i % 2].format(turn) for i, turn in enumerate(turns)]
    return "\n\n".join([*lines, "Assistant:"])


def chat_text(tokenizer: Any, turns: Sequence[str]) -> str:
    """A text that encodes to the ids of the chat template.

    Encoding adds the first special token, which the template also writes, so it is removed here.
    """
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    wanted = tokenizer.chat(messages)
    text = rendered(tokenizer.inner, messages, add_generation_prompt=True)
    first = getattr(tokenizer.inner, "bos_token", None) or ""
    shorter = text.removeprefix(first)
    return shorter if tokenizer.encode(shorter) == wanted else text
