"""Texts that a regular expression matches as a whole.

The syntax is that of Rust's `regex` crate: no look-around, no back-references. Matching is linear
in the text, whatever the expression.
"""

from __future__ import annotations

import json

from forerun.constraints._grammar_constraint import GrammarConstraint
from forerun.constraints._matcher import library


class Regex(GrammarConstraint):
    """Allows the texts that `pattern` matches from start to end."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def source(self) -> str:
        made = json.loads(library().LLMatcher.grammar_from_regex(self.pattern))
        return made["grammars"][0]["lark_grammar"]
