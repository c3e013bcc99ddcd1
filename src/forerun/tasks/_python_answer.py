"""Extracts the program from a model's answer, without examples, tests and prose."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterable

ALWAYS = (ast.Import, ast.ImportFrom, ast.Try, ast.If)  # kept: they may contain imports
INDENT = "    "  # of the functions to complete
_FENCED = re.compile(r"```[ \t]*[\w+-]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_FIRST_LINE = re.compile(r"^(?:from\s+\w|import\s+\w|(?:async\s+)?def\s+\w|class\s+\w|@\w)", re.M)


def program(text: str, names: Iterable[str]) -> str:
    """The definitions of an answer that the named functions need.

    The code is the first block that defines one of the names, or the first block. Without a block
    it is the whole text if that is Python, otherwise the text from the first line of code.
    """
    blocks, wanted = fenced(text), list(names)
    if blocks:
        return needed(next((b for b in blocks if defines(b, wanted)), blocks[0]), wanted)
    first = _FIRST_LINE.search(text)
    return needed(text[first.start() :] if first and not is_python(text) else text, wanted)


def completed(prompt: str, entry_point: str, text: str, others: Iterable[str] = ()) -> str:
    """The program of an answer to a prompt that ends within a function.

    An answer that defines the function replaces it; any other continues the prompt. Definitions
    that the other names need are kept too.
    """
    names = [entry_point, *others]
    code = program(text, names)
    if defines(code, [entry_point]):
        return needed(f"{prompt[: start_of(prompt, entry_point)]}\n{code}", names)
    blocks = fenced(text)
    return needed(prompt + (textwrap.indent(blocks[0], INDENT) if blocks else body(text)), names)


def needed(code: str, names: Iterable[str]) -> str:
    """The imports of some code, and the definitions that the named functions use.

    Drops examples and tests of the model, and everything after the longest prefix that is Python:
    prose or an incomplete line.
    """
    tree = _tree(longest_python(code))
    if tree is None:
        return ""
    bound = [(node, _bound(node)) for node in tree.body]
    used, todo = set[str](), set(names)
    while todo:
        used |= todo
        users = (node for node, made in bound if made & todo)
        todo = {name for user in users for name in _read(user)} - used
    tree.body = [node for node, made in bound if isinstance(node, ALWAYS) or made & used]
    tree.body.sort(key=lambda node: getattr(node, "module", None) != "__future__")
    try:
        return ast.unparse(tree) + "\n" if tree.body else ""
    except RecursionError:
        return ""


def _read(node: ast.stmt) -> set[str]:
    """The names that a statement reads and does not bind as a local name or parameter."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    local = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    local |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return {n.id for n in names if isinstance(n.ctx, ast.Load)} - local


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement defines or assigns."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return set()


def fenced(text: str) -> list[str]:
    """The code blocks of a text; the last one may be incomplete."""
    return [textwrap.dedent(block) for block in _FENCED.findall(text)]


def defines(code: str, names: Iterable[str]) -> bool:
    """Whether the code defines a function with one of the names."""
    return any(re.search(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(n)}\b", code, re.M) for n in names)


def start_of(prompt: str, entry_point: str) -> int:
    """Start of the last definition of a function; the prompt's end if there is none."""
    found = list(re.finditer(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", prompt, re.M))
    return found[-1].start() if found else len(prompt)


def body(text: str) -> str:
    """The lines that continue a function: up to the first that is not indented."""
    lines = text.strip("\n").split("\n")
    end = next((k for k, line in enumerate(lines) if line[:1].strip()), len(lines))
    return "\n".join(lines[:end]) + "\n"


def longest_python(code: str) -> str:
    """The longest prefix, in whole lines, that parses."""
    lines = code.rstrip().split("\n")
    for end in range(len(lines), 0, -1):
        part = "\n".join(lines[:end]) + "\n"
        if is_python(part):
            return part.lstrip("\n")
    return ""


def called(code: str) -> list[str]:
    """Names of the functions that the code calls, in order; none if it is not Python."""
    tree = _tree(code)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree else []
    return list(dict.fromkeys(func.id for func in calls if isinstance(func, ast.Name)))


def is_python(code: str) -> bool:
    """Whether the code parses."""
    return _tree(code) is not None


def _tree(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
