"""Scores of answers: per sample, mean, majority, pass@k; and the kept lines of an error."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import comb
from typing import TYPE_CHECKING

from forerun.bench.results import Manifest, Record, SampleRecord
from forerun.errors import ForerunError
from forerun.tasks import is_pass_fail
from forerun.utils.stats import majority

if TYPE_CHECKING:
    from forerun.tasks.base import Example, Task

MAX_ERROR_LINES = 12  # kept in a record


def scored(task: Task, example: Example, sample: SampleRecord) -> SampleRecord:
    """The sample with its score, if its text is known."""
    text = text_to_score(task, sample)
    return sample if text is None else replace(sample, score=task.score(example, text))


def text_to_score(task: Task, sample: SampleRecord) -> str | None:
    """The text of a sample; "" if the token limit cut it before the task's answer."""
    if sample.text is None or sample.finish != "length":
        return sample.text
    has_answer = getattr(task, "has_answer", None)
    return sample.text if has_answer is None or has_answer(sample.text) else ""


def mean(scores: Sequence[float | None]) -> float | None:
    """Mean of scores; None if one is unknown."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known and len(known) == len(scores) else None


def majority_score(task: Task, example: Example, texts: Sequence[str | None]) -> float | None:
    """Score of the most common answer; the first one seen wins a tie.

    0.0 if no text has an answer; None for tasks without answers to vote on.
    """
    if not example.answer or any(text is None for text in texts):
        return None
    answers = [(task.read(text), text) for text in texts if text is not None]
    winner = majority([answer for answer, _ in answers])
    if winner is None:
        return None if task.read(example.reference or example.answer) is None else 0.0
    return task.score(example, next(text for answer, text in answers if answer == winner))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased pass@k of one problem: 1 - C(n - c, k) / C(n, k); k is at most n.

    "Evaluating Large Language Models Trained on Code" (2021).
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be 1 to {num_samples}, the number of samples, got {k}")
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def pass_at_ks(manifest: Manifest, task: str, records: Iterable[Record]) -> dict[int, float]:
    """pass@k of one method on one task, mean over problems, for k = 1, 2, 4, ... and n.

    Samples of a problem in several rounds count together. Empty for a task with partial scores, for
    single samples, and if a score is unknown.
    """
    if not is_pass_fail(manifest.tasks[task].get("task", task)):
        return {}
    scores: dict[int, list[float | None]] = {}
    for record in records:
        if record.error is None:
            scores.setdefault(record.index, []).extend(one.score for one in record.samples)
    if not all(score in (0.0, 1.0) for some in scores.values() for score in some):
        return {}
    fewest = min(map(len, scores.values()), default=0)
    if fewest < 2:
        return {}
    counts = [(len(some), sum(score == 1.0 for score in some)) for some in scores.values()]
    steps = [*(2**i for i in range((fewest - 1).bit_length())), fewest]
    return {k: sum(pass_at_k(n, c, k) for n, c in counts) / len(counts) for k in steps}


def last_line(text: str) -> str:
    """The last line of an error."""
    return (text.strip().splitlines() or [""])[-1]


def last_lines(error: BaseException) -> str:
    """The message of a forerun error, or the end of any other error's traceback."""
    if isinstance(error, ForerunError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(error))
    return "\n".join(text.strip().splitlines()[-MAX_ERROR_LINES:])
