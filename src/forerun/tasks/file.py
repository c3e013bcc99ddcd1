"""Prompts from a file of the user: a text file is one prompt, JSON lines have one prompt each.

A line is {"prompt": "..."} or {"turns": ["user", "model", "user"]}; it may also have an id, an
answer and a category, which may be called "domain", as in the prompts of `train draft`. A text that
contains the answer scores 1.0; without an answer there is no score.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.errors import DataError, UnknownName

from ._lines import check, encoded, objects, read_text, texts
from .base import Example, plain_text

FIELDS = ("prompt", "turns", "id", "category", "domain", "answer")


class FileTask:
    """The prompts of a file. Raises DataError with file and line."""

    is_pass_fail = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        text = read_text(self.path)
        plain = Path(self.path.name.removesuffix(".gz"))
        name = plain.stem
        if plain.suffix == ".jsonl":
            self.examples = [
                _example(where, i, v) for i, (where, v) in enumerate(objects(self.path))
            ]
        elif text.strip():
            prompt = text.removesuffix("\n")
            self.examples = [Example(f"{name}-0", prompt, "", category=name)]
        else:
            raise DataError(f"{self.path} is empty; write a prompt, or JSON lines with prompts")

    @classmethod
    def of_path(cls, text: str) -> FileTask:
        """The task of the text after `file:`."""
        return cls(text)

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.examples)

    def example(self, i: int) -> Example:
        """The i-th prompt."""
        if not 0 <= i < len(self.examples):
            raise IndexError(f"prompt {i} of {self.path}, which has {len(self.examples)}")
        return self.examples[i]

    def score(self, example: Example, text: str) -> float | None:
        """1.0 if the text contains the answer in the file; None if the file has none."""
        return float(example.answer in text) if example.answer else None

    def read(self, text: str) -> str | None:
        """No final answer to vote on."""
        return None


def _example(where: str, i: int, value: dict[str, Any]) -> Example:
    for key in value:
        if key not in FIELDS:
            raise UnknownName.of(f"field in {where}:", key, FIELDS)
    if ("prompt" in value) == ("turns" in value):
        raise DataError(f'{where} needs either "prompt", a text, or "turns", a list of texts')
    turns = texts(where, "turns", value["turns"]) if "turns" in value else ()
    if len(turns) % 2 == 0 and turns:
        raise DataError(f"{where}: turns must end with the user's, got {len(turns)} turns")
    prompt = plain_text(turns) if turns else check(where, "prompt", value["prompt"])
    rest = {
        k: encoded(where, k, str(value[k]))
        for k in ("id", "answer", "category", "domain")
        if value.get(k) is not None
    }
    name, answer = rest.get("id", str(i)), rest.get("answer", "")
    category = rest.get("category", rest.get("domain", ""))
    return Example(name, prompt, answer, category=category, turns=turns)
