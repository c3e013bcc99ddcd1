"""Spec-Bench questions from a `question.jsonl`: `spec_bench:PATH` or `spec_bench:PATH:CATEGORY`.

Every turn is an example; the prompt of a later turn has the answers to the earlier ones. There is
no score: the benchmark measures speed (see `forerun.bench.spec_bench`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import DataError, UnknownName

from ._file_task import split_part
from ._lines import check, encoded, objects, texts
from .base import Example, plain_text

MT_BENCH = "mt_bench"
MT_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


class SpecBenchTask:
    """The turns of the questions in a file; a category keeps only its questions."""

    def __init__(self, path: str | Path, category: str = "") -> None:
        self.path = Path(path).expanduser()
        questions = read_questions(self.path)
        known = {q.category for q in questions}
        known |= {MT_BENCH} if any(q.group == MT_BENCH for q in questions) else set()
        if category and category not in known:
            raise UnknownName.of(f"category of {self.path}:", category, known)
        self.questions = [q for q in questions if category in ("", q.category, q.group)]
        self.turns = [(q, turn) for q in self.questions for turn in range(len(q.turns))]

    @classmethod
    def of_path(cls, text: str) -> SpecBenchTask:
        """The task of the text after `spec_bench:`."""
        return cls(*split_part(text))

    def __len__(self) -> int:
        """Number of turns of all questions."""
        return len(self.turns)

    def example(self, i: int) -> Example:
        """The i-th turn, with empty answers to the earlier turns."""
        if not 0 <= i < len(self.turns):
            raise IndexError(f"turn {i} of {self.path}, which has {len(self.turns)}")
        question, turn = self.turns[i]
        turns = tuple(part for asked in question.turns[:turn] for part in (asked, ""))
        turns += (question.turns[turn],)
        return Example(
            question.turn_ids[turn],
            plain_text(turns),
            "",
            reference=question.reference[turn] if turn < len(question.reference) else "",
            category=question.category,
            turns=turns,
            after=tuple(range(i - turn, i)),
            source=question.turns[0],
        )

    def stratum(self, example: Example) -> str:
        """The group in Spec-Bench's results; suites use equally many questions of each."""
        return MT_BENCH if example.category in MT_CATEGORIES else example.category

    def score(self, example: Example, text: str) -> None:
        """None: Spec-Bench does not score answers."""
        return None

    def read(self, text: str) -> None:
        """No final answer to vote on."""
        return None


@dataclass(frozen=True)
class Question:
    """One line of a question file."""

    id: int | str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()

    @property
    def turn_ids(self) -> list[str]:
        """ "81.1" for the first turn of question 81."""
        return [f"{self.id}.{turn}" for turn in range(1, len(self.turns) + 1)]

    @property
    def group(self) -> str:
        """The category, or mt_bench for its eight."""
        return MT_BENCH if self.category in MT_CATEGORIES else self.category


def read_questions(path: Path) -> list[Question]:
    """The questions of a file, in order. Raises DataError with file and line."""
    found: dict[int | str, Question] = {}
    for where, value in objects(path):
        question = _question(where, value)
        if question.id in found:
            raise DataError(f"{where}: question_id {question.id!r} occurs twice")
        found[question.id] = question
    return list(found.values())


def question_id(where: str, value: dict[str, Any]) -> int | str:
    """The question id on a line of a question or answer file. Raises DataError."""
    name = value.get("question_id")
    if isinstance(name, bool) or not isinstance(name, int | str) or name == "":
        raise DataError(f"{where}: question_id must be a number or a text, got {name!r}")
    return encoded(where, "question_id", name) if isinstance(name, str) else name


def _question(where: str, value: dict[str, Any]) -> Question:
    name = question_id(where, value)
    category = check(where, "category", value.get("category"))
    given = value.get("reference", [])
    references = tuple(given) if isinstance(given, list) else (given,)
    is_text = all(isinstance(text, str) for text in references)
    turns = texts(where, "turns", value.get("turns"))
    return Question(name, category, turns, references if is_text else ())
