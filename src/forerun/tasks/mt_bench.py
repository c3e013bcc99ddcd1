"""MT-Bench from its `question.jsonl`: `mt_bench:PATH` or `mt_bench:PATH:CATEGORY`.

Both turns are examples; the prompt of the second turn has the answer to the first, as in
`spec_bench`. There is no score: MT-Bench uses another model as judge.
"""

from __future__ import annotations

from pathlib import Path

from forerun.errors import DataError

from ._file_task import split_part
from .base import Example
from .spec_bench import MT_CATEGORIES, SpecBenchTask

TURNS = 2


class MtBenchTask(SpecBenchTask):
    """Questions of two turns in eight categories."""

    def __init__(self, path: str | Path, category: str = "") -> None:
        super().__init__(path, category)
        for question in self.questions:
            where = f"{self.path}: question {question.id!r}"
            if len(question.turns) != TURNS:
                raise DataError(f"{where} must have {TURNS} turns, has {len(question.turns)}")
            if question.category not in MT_CATEGORIES:
                raise DataError(
                    f"{where} has category {question.category!r}, which MT-Bench lacks; use "
                    f"spec_bench:{self.path} for other categories"
                )

    @classmethod
    def of_path(cls, text: str) -> MtBenchTask:
        """The task of the text after `mt_bench:`."""
        return cls(*split_part(text))

    def stratum(self, example: Example) -> str:
        """The category; suites use equally many questions of each."""
        return example.category
