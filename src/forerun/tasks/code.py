"""Code: complete the last function of a small Python module, or rename a name in it.

Score: 1.0 if the syntax trees agree; otherwise the share of equal lines for completions, and 0 for
renames. Other correct ways to write a function count as different. Code is never run. The embedded
reasoner cannot do this; its scores mean nothing.
"""

from __future__ import annotations

import ast
import random
import re
import warnings

from forerun.errors import ConfigError

from ._code_templates import FUNCTIONS, draw_module, rename
from ._prose import similarity
from .base import Example, Generated, plain_text

_FENCED = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)


class CodeTask(Generated):
    """Modules with `functions` functions each."""

    def __init__(self, *, functions: int = 4, seed: int = 0, size: int = 1000) -> None:
        super().__init__(seed=seed, size=size)
        if not 1 <= functions <= len(FUNCTIONS):
            raise ConfigError(f"functions must be 1 to {len(FUNCTIONS)}, got {functions}")
        self.functions = functions

    def make(self, i: int, rng: random.Random) -> Example:
        """Categories alternate: complete, edit."""
        module = draw_module(rng, self.functions)
        return _edit(rng, module) if i % 2 else _complete(module)

    def score(self, example: Example, text: str) -> float:
        """Agreement of the syntax trees; for completions also of the lines."""
        if example.category == "edit":
            return float(same(module_of(text), example.answer))
        body, start = body_of(text), head_of(example)
        if same(start + body, start + example.answer):
            return 1.0
        agree = similarity(body, example.answer, lambda code: code.strip().split("\n"))
        return min(0.9, agree)  # equal lines may still be indented differently


def _complete(module: list[str]) -> Example:
    *before, last = module
    head, mark, body = last.rpartition('"""\n')
    code = "\n\n".join([*before, head + mark])
    task = (
        "Complete the last function of this module. Answer with the lines that are missing, "
        "indented as they belong, and nothing else."
    )
    turns = (f"{task}\n\n```python\n{code}```",)
    return Example("", code, body, reference=body, category="complete", turns=turns)


def _edit(rng: random.Random, module: list[str]) -> Example:
    code = "\n\n".join(module)
    old, new = rename(rng, code)
    wanted = re.sub(rf"\b{old}\b", new, code)
    task = (
        f"Rename `{old}` to `{new}` in this module, wherever it is used. Answer with the whole "
        "module and nothing else."
    )
    turns = (f"{task}\n\n```python\n{code}```",)
    return Example("", plain_text(turns), wanted, reference=wanted, category="edit", turns=turns)


def head_of(example: Example) -> str:
    """The first line of the function to complete."""
    return example.prompt[example.prompt.rindex("def ") :].partition("\n")[0] + "\n"


def module_of(text: str) -> str:
    """The code of an answer: its first fenced block, or all of it."""
    match = _FENCED.search(text)
    return match.group(1) if match else text


def body_of(text: str) -> str:
    """The lines that complete a function: up to the first that is not indented."""
    code = module_of(text)
    lines = code.lstrip("\n").split("\n")
    if lines and lines[0].startswith("def "):  # the answer repeats the first line
        lines = lines[1:]
    end = next((k for k, line in enumerate(lines) if line[:1].strip()), len(lines))
    return "\n".join(lines[:end]).rstrip() + "\n"


def same(text: str, reference: str) -> bool:
    """Whether both are Python with the same syntax tree, apart from docstrings."""
    tree = _tree(text)
    return tree is not None and tree == _tree(reference)


def _tree(code: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
