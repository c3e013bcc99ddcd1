"""The program that a model's answer states: its code block, or its unfenced lines of code."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterable

INDENT = "    "  # of the functions that are to be completed
_FENCED = re.compile(r"```[ \t]*[\w+-]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_FIRST_LINE = re.compile(r"^(?:from\s+\w|import\s+\w|(?:async\s+)?def\s+\w|class\s+\w|@\w)", re.M)


def program(text: str, names: Iterable[str]) -> str:
    """The code of an answer: the first block that defines one of the names, or the first block.

    Without a block, the whole text if it is Python, else what follows its first line of code. What
    follows the longest beginning that is Python is dropped: prose, or a line that was cut.
    """
    blocks, wanted = fenced(text), list(names)
    if blocks:
        return longest_python(next((b for b in blocks if defines(b, wanted)), blocks[0]))
    first = _FIRST_LINE.search(text)
    return longest_python(text[first.start() :] if first and not _parses(text) else text)


def completed(prompt: str, entry_point: str, text: str) -> str:
    """The program of an answer to a prompt that ends within a function.

    An answer that defines the function replaces it, any other goes on where the prompt ends.
    """
    code = program(text, [entry_point])
    if defines(code, [entry_point]):
        return prompt[: start_of(prompt, entry_point)] + code
    blocks = fenced(text)
    return prompt + (textwrap.indent(blocks[0], INDENT) if blocks else body(text))


def fenced(text: str) -> list[str]:
    """The code blocks of a text; the limit of tokens may have cut the last one."""
    return [textwrap.dedent(block) for block in _FENCED.findall(text)]


def defines(code: str, names: Iterable[str]) -> bool:
    """Whether a line of the code defines a function of one of the names."""
    return any(re.search(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(n)}\b", code, re.M) for n in names)


def start_of(prompt: str, entry_point: str) -> int:
    """Where the last definition of a function begins; the prompt's end if it has none."""
    found = list(re.finditer(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", prompt, re.M))
    return found[-1].start() if found else len(prompt)


def body(text: str) -> str:
    """The lines that go on with a function: up to the first that is not indented."""
    lines = text.strip("\n").split("\n")
    end = next((k for k, line in enumerate(lines) if line[:1].strip()), len(lines))
    return "\n".join(lines[:end]) + "\n"


def longest_python(code: str) -> str:
    """The longest beginning, in whole lines, that parses."""
    lines = code.rstrip().split("\n")
    for end in range(len(lines), 0, -1):
        part = "\n".join(lines[:end]) + "\n"
        if _parses(part):
            return part.lstrip("\n")
    return ""


def called(code: str) -> list[str]:
    """Names of the functions that the code calls, in order."""
    tree = ast.parse(code)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return list(dict.fromkeys(func.id for func in calls if isinstance(func, ast.Name)))


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
