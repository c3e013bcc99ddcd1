"""HumanEval from its `HumanEval.jsonl.gz`: `humaneval:PATH`. Runs the code that the model writes.

Score: 1.0 if the function passes the file's tests in a sandbox, otherwise 0.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.errors import DataError

from ._file_task import FromFile, check_unique
from ._lines import field, objects
from ._python_answer import called, completed, defines, is_python
from ._sandbox import check_supported, run_tests
from .base import Example

WORDING = (
    "Complete this Python function. Answer with the whole function in one code block.\n\n"
    "```python\n{prompt}```"
)
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


class HumanEvalTask(FromFile):
    """Functions to complete; a model without a chat template continues the prompt itself."""

    is_pass_fail = True

    def __init__(self, path: str | Path) -> None:
        check_supported()
        super().__init__(path)
        self.problems: dict[str, dict[str, str]] = {}
        seen: set[str] = set()
        for where, value in objects(self.path):
            problem = _problem(where, value)
            name = check_unique(where, seen, "task_id", problem["task_id"])
            self.problems[name] = problem
        self.examples = [_example(problem) for problem in self.problems.values()]

    @classmethod
    def of_path(cls, text: str) -> HumanEvalTask:
        """The task of the text after `humaneval:`."""
        return cls(text)

    def score(self, example: Example, text: str) -> float:
        """1.0 if the tests pass, otherwise 0.0."""
        problem = self.problems[example.id]
        name, tests = problem["entry_point"], problem["test"]
        program = completed(problem["prompt"], name, text, called(tests))
        return float(run_tests(program, f"{tests}\n\ncheck({name})\n").passed)


def _problem(where: str, value: dict[str, Any]) -> dict[str, str]:
    problem = {name: field(where, value, name) for name in FIELDS}
    if not defines(problem["prompt"], [problem["entry_point"]]):
        raise DataError(f"{where}: prompt does not define entry_point {problem['entry_point']!r}")
    if "def check(" not in problem["test"] or not is_python(problem["test"]):
        raise DataError(f"{where}: test must be Python that defines check(candidate)")
    return problem


def _example(problem: dict[str, str]) -> Example:
    prompt = problem["prompt"]
    return Example(
        problem["task_id"],
        prompt,
        "",
        reference=problem["canonical_solution"],
        category="python",
        turns=(WORDING.format(prompt=prompt if prompt.endswith("\n") else f"{prompt}\n"),),
        source=prompt,
    )
