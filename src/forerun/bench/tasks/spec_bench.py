"""Spec-Bench questions from a `question.jsonl`: `spec_bench:PATH` or `spec_bench:PATH:CATEGORY`.

Every turn is an example of its own, and a later turn is shown the answers to the earlier ones.
There is no score: what is measured is speed (`forerun.bench.spec_bench` does its accounting).
"""

from __future__ import annotations

from pathlib import Path

from forerun.bench.spec_bench import MT_BENCH, read_questions
from forerun.errors import UnknownName

from .base import Example, plain_text


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
        path, _, category = text.rpartition(":")
        if not path or Path(text).expanduser().exists() or "/" in category:
            return cls(text)
        return cls(path, category)

    def __len__(self) -> int:
        """Number of turns of all questions."""
        return len(self.turns)

    def example(self, i: int) -> Example:
        """The i-th turn, its question's earlier answers left empty."""
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
        )

    def score(self, example: Example, text: str) -> None:
        """Spec-Bench judges no answers."""
        return None

    def read(self, text: str) -> None:
        """No final answer to vote on."""
        return None
