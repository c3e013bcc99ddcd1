"""Texts that a regular expression matches as a whole.

The syntax is that of Rust's `regex` crate: no look-around, no back-references. Matching is linear
in the text, whatever the expression.
"""

from __future__ import annotations

import json

from forerun.constraints._compiled import library
from forerun.constraints._grammar_constraint import GrammarConstraint
from forerun.errors import ConfigError


class Regex(GrammarConstraint):
    """Allows the texts that `pattern` matches from start to end."""

    def __init__(self, pattern: str) -> None:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(
                f"a regular expression must be a text that is not empty, got {pattern!r:.80}; "
                "try [0-9]+"
            )
        self.pattern = pattern

    def explained(self, message: str) -> str:
        reason = message.rpartition("error: ")[2]
        return (
            f"the regular expression {self.pattern!r:.80} cannot be used: {reason}; the syntax is "
            "that of Rust's regex crate"
        )

    def source(self) -> str:
        made = json.loads(library().LLMatcher.grammar_from_regex(self.pattern))
        return made["grammars"][0]["lark_grammar"]
