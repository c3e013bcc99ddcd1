"""GSM8K word problems from its `test.jsonl`: `gsm8k:PATH`.

Score: 1.0 if the final number of the answer is that of the reference, otherwise 0.0.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from forerun.errors import DataError

from ._file_task import FromFile
from ._lines import field, objects
from .base import Example

WORDING = '{question}\n\nThink step by step, and end with "The answer is NUMBER."'
COMPLETION = "Question: {question}\nAnswer:"
MARK = "####"  # before the answer in the file
NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = rf"(?:{MARK}|\\boxed\{{|answer(?: is:?|:))[\s*$]*(?:\\\w+\{{)?({NUMBER})"
_STATED = re.compile(_MARKED, re.IGNORECASE)
_COMPLETE = re.compile(rf"{_MARKED}(?=[.,]?[^\d.,])", re.IGNORECASE)  # no digits can follow
_NUMBER = re.compile(NUMBER)
_NEXT_QUESTION = re.compile(r"\n\s*Question:")


class Gsm8kTask(FromFile):
    """Problems with `question` and `answer`, where the answer ends in `#### NUMBER`."""

    is_pass_fail = True

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        lines = enumerate(objects(self.path), start=1)
        self.examples = [_example(where, number, value) for number, (where, value) in lines]

    @classmethod
    def of_path(cls, text: str) -> Gsm8kTask:
        """The task of the text after `gsm8k:`."""
        return cls(text)

    def score(self, example: Example, text: str) -> float:
        """1.0 if the final number is that of the reference, otherwise 0.0."""
        return float(self.read(text) == example.answer)

    def has_answer(self, text: str) -> bool:
        """Whether a cut text states its final answer: a whole number with a mark."""
        found = _COMPLETE.search(text)
        return found is not None and found.end() <= len(_own(text))

    def read(self, text: str) -> str | None:
        """The last number marked as the answer, otherwise the last number."""
        text = _own(text)
        found = _STATED.findall(text) or _NUMBER.findall(text)
        return canonical(found[-1]) if found else None


def _own(text: str) -> str:
    """The answer without further questions, which base models add."""
    return _NEXT_QUESTION.split(text, maxsplit=1)[0]


def canonical(number: str) -> str | None:
    """A number in one form: "1,200.50" and "$1200.5" give "1200.5"; None if it is not a number."""
    if not _NUMBER.fullmatch(number):
        return None
    value = Decimal(number.replace(",", "").replace("$", ""))
    return f"{value.normalize():f}" if value else "0"


def _example(where: str, number: int, value: dict[str, Any]) -> Example:
    question, solution = field(where, value, "question").strip(), field(where, value, "answer")
    _, mark, end = solution.rpartition(MARK)
    answer = canonical(end.strip()) if mark else None
    if answer is None:
        raise DataError(f"{where}: answer must end in '{MARK} NUMBER', got {solution[-40:]!r}")
    return Example(
        f"gsm8k-{number}",
        COMPLETION.format(question=question),
        answer,
        reference=solution,
        category="maths",
        turns=(WORDING.format(question=question),),
        source=question,
    )
