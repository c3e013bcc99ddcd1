"""MBPP from its `mbpp.jsonl`: `mbpp:PATH` or `mbpp:PATH:SPLIT`. Runs code that the model writes.

Score: 1.0 if the function passes the file's tests in a sandbox, otherwise 0.0. The default is the
published test split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.errors import DataError, UnknownName

from ._file_task import FromFile, check_unique, split_part
from ._lines import encoded, field, objects, texts
from ._python_answer import called, is_python, program
from ._sandbox import check_supported, run_tests
from .base import Example

WORDING = (
    "{text} It must pass these tests:\n\n```python\n{tests}\n```\n\n"
    "Answer with the whole function in one code block."
)
COMPLETION = '"""\n{text}\n{tests}\n"""\n'
SPLITS = {  # task_id, as published
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}


class MbppTask(FromFile):
    """Problems with `text`, `task_id`, `test_list` and `test_setup_code`."""

    is_pass_fail = True

    def __init__(self, path: str | Path, split: str = "test") -> None:
        check_supported()
        super().__init__(path)
        if split not in SPLITS:
            raise UnknownName.of("split of MBPP", split, SPLITS)
        self.tests: dict[str, str] = {}
        self.names: dict[str, list[str]] = {}
        seen: set[str] = set()
        for where, value in objects(self.path):
            example, tests = _example(where, value)
            check_unique(where, seen, "task_id", example.id)
            if value["task_id"] in SPLITS[split]:
                self.examples.append(example)
                self.tests[example.id], self.names[example.id] = tests, called(tests)
        if not self.examples:
            ids = SPLITS[split]
            raise DataError(
                f"{self.path} has no problem of the split {split!r} (task_id {ids[0]} to "
                f"{ids[-1]}); give another split, e.g. mbpp:PATH:train"
            )

    @classmethod
    def of_path(cls, text: str) -> MbppTask:
        """The task of the text after `mbpp:`."""
        path, split = split_part(text)
        return cls(path, split or "test")

    def score(self, example: Example, text: str) -> float:
        """1.0 if the tests pass, otherwise 0.0."""
        code = program(text, self.names[example.id])
        return float(run_tests(code, self.tests[example.id]).passed)


def _example(where: str, value: dict[str, Any]) -> tuple[Example, str]:
    """The example of a line, and its tests with their setup code."""
    number = value.get("task_id")
    if isinstance(number, bool) or not isinstance(number, int):
        raise DataError(f"{where}: task_id must be a whole number, got {number!r}")
    text = field(where, value, "text").strip()
    tests = "\n".join(texts(where, "test_list", value.get("test_list")))
    setup = value.get("test_setup_code", "")
    if not isinstance(setup, str):
        raise DataError(f"{where}: test_setup_code must be a text, got {setup!r}")
    if not is_python(tests):
        raise DataError(f"{where}: test_list is not Python: {tests!r}")
    example = Example(
        f"mbpp-{number}",
        COMPLETION.format(text=text, tests=tests),
        "",
        reference=field(where, value, "code").replace("\r\n", "\n"),
        category="python",
        turns=(WORDING.format(text=text, tests=tests),),
        source=text,
    )
    return example, f"{encoded(where, 'test_setup_code', setup)}\n{tests}\n"
