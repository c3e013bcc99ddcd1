"""MT-Bench from its `question.jsonl`: `mt_bench:PATH` or `mt_bench:PATH:CATEGORY`.

Both turns are examples. The second turn is shown the answer to the first one, as in `spec_bench`.
There is no score: MT-Bench has its answers judged by another model.
"""

from __future__ import annotations

from pathlib import Path

from forerun.errors import DataError

from ._file_task import divided
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
                    f"{where} has category {question.category!r}, which MT-Bench lacks; "
                    f"spec_bench:{self.path} takes any category"
                )

    @classmethod
    def of_path(cls, text: str) -> MtBenchTask:
        """The task of the text after `mt_bench:`."""
        return cls(*divided(text))

    def stratum(self, example: Example) -> str:
        """The category; suites take as many questions of each."""
        return example.category
