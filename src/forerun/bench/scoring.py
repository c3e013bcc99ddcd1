"""What a record says of its texts and of its errors."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from forerun.bench.results import SampleRecord
from forerun.errors import ForerunError
from forerun.utils.stats import majority

if TYPE_CHECKING:
    from forerun.tasks.base import Example, Task

LAST_LINES = 12  # of an error that a record keeps


def scored(task: Task, example: Example, sample: SampleRecord) -> SampleRecord:
    """The sample with its score, if its text is known."""
    return (
        sample if sample.text is None else replace(sample, score=task.score(example, sample.text))
    )


def mean(scores: Sequence[float | None]) -> float | None:
    """Mean of scores; None where one is unknown."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known and len(known) == len(scores) else None


def majority_score(task: Task, example: Example, texts: Sequence[str | None]) -> float | None:
    """The score of the first text whose answer is the commonest (ties: the one seen first).

    0.0 where no text answers; None for tasks without answers to vote on.
    """
    if not example.answer or any(text is None for text in texts):
        return None
    answers = [(task.read(text), text) for text in texts if text is not None]
    winner = majority([answer for answer, _ in answers])
    if winner is None:
        return None if task.read(example.reference or example.answer) is None else 0.0
    return task.score(example, next(text for answer, text in answers if answer == winner))


def last_line(text: str) -> str:
    """The last line of an error."""
    return (text.strip().splitlines() or [""])[-1]


def last_lines(error: BaseException) -> str:
    """What is kept of an error: its message if it is ours, else the end of its traceback."""
    if isinstance(error, ForerunError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(error))
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])
