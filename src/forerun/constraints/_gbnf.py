"""GBNF and EBNF (`root ::= ...`) as Lark in the dialect of llguidance.

llguidance converts GBNF, but writes rule names in lower case, so that `Start` and `start` collide.
Rules are numbered before.
"""

from __future__ import annotations

import re

from forerun.constraints._compiled import library
from forerun.errors import DataError, in_a_line

# a string, a class of characters, a comment, or a name
PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[A-Za-z_][\w-]*')
RULE = re.compile(r"^\s*([A-Za-z_][\w-]*)\s*::=", re.MULTILINE)
ROOT = "root"


def as_lark(text: str, notation: str) -> str:
    """The grammar in Lark. Raises DataError."""
    names = {name: f"rule-{i}" for i, name in enumerate(dict.fromkeys(RULE.findall(text)))}
    names[ROOT] = ROOT

    def renamed(match: re.Match[str]) -> str:
        part = match.group()
        return names.get(part, part)  # strings, classes and comments stay

    try:
        return library().gbnf_to_lark.gbnf_to_lark(PART.sub(renamed, text))
    except Exception as error:
        numbers = {number: name for name, number in names.items()}
        said = re.sub(r"rule-\d+", lambda m: numbers.get(m.group(), m.group()), in_a_line(error))
        raise DataError(f"the grammar is no {notation.upper()}: {said}") from None
