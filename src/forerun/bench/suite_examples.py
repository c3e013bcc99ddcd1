"""Seeded selection of a suite's examples within one half of a task.

The half of an example depends only on its problem text. So the halves share no example for any
seed, number of examples and file order, and a problem in several files is in the same half of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from forerun.tasks import is_file

if TYPE_CHECKING:
    from forerun.tasks.base import Example, Task

HALVES = ("tuning", "held_out")
HELD_OUT = HALVES[1]
POOL = 400  # examples of a generated task, from which a suite picks


def half_of(example: Example) -> str:
    """ "tuning" or "held_out", by a hash of the problem's text."""
    return HALVES[_hash(f"half/{problem_text(example)}")[0] % 2]


def problem_text(example: Example) -> str:
    """The problem text without added instructions, spaces and case normalised."""
    text = example.source or (example.turns or (example.prompt,))[0]
    return " ".join(text.split()).casefold()


def picked(task: Task, num_questions: int, half: str, key: str) -> list[int]:
    """Indices of questions of one half, in order, balanced over categories.

    The key seeds the selection. All turns of a question are selected together. A larger number only
    adds questions.
    """
    label: Callable[[Example], str] = getattr(task, "stratum", lambda example: example.label)
    strata: dict[str, list[tuple[bytes, list[int]]]] = {}
    for turns in questions(task):
        first = task.example(turns[0])
        if half_of(first) == half:
            order = _hash(f"{key}/{problem_text(first)}")
            strata.setdefault(label(first), []).append((order, turns))
    columns = [sorted(strata[name]) for name in sorted(strata)]
    deepest = max(map(len, columns), default=0)
    rows = [column[k] for k in range(deepest) for column in columns if k < len(column)]
    return sorted(index for _, turns in rows[:num_questions] for index in turns)


def questions(task: Task) -> list[list[int]]:
    """The indices of every question: its first turn and the turns that build on it."""
    size = len(task) if is_file(task) else min(len(task), POOL)
    found: dict[int, list[int]] = {}
    for i in range(size):
        found.setdefault(min(task.example(i).after, default=i), []).append(i)
    return list(found.values())


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
