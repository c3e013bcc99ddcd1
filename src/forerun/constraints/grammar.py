"""Texts of a context-free grammar in Lark, GBNF or EBNF notation.

GBNF is llama.cpp's notation, EBNF that of transformers-cfg (`root ::= ...`). Both are converted to
Lark in the dialect of llguidance.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from forerun.constraints._gbnf import as_lark
from forerun.constraints._grammar_constraint import GrammarConstraint, text_of
from forerun.errors import ConfigError, DataError, UnknownName, did_you_mean
from forerun.registry import File

LARK, GBNF, EBNF = "lark", "gbnf", "ebnf"
NOTATIONS = (LARK, GBNF, EBNF)
OPTIONS_LINE = re.compile(r"^[ \t]*%llguidance\s*(?={)", re.MULTILINE)
KNOWN_OPTIONS = ("allow_initial_skip", "allow_invalid_utf8", "ignore_once", "no_forcing")


class Grammar(GrammarConstraint):
    """Allows the texts of a grammar.

    text: the grammar; or file: its file. notation: "lark", "gbnf" or "ebnf"; None: by the suffix of
    the file, or by the text (`::=` is GBNF).
    """

    def __init__(
        self, text: str | None = None, *, file: File | None = None, notation: str | None = None
    ) -> None:
        if (text is None) == (file is None):
            raise ConfigError("a grammar needs a text or a file, one of the two")
        if notation is not None and notation not in NOTATIONS:
            raise UnknownName.of("notation", notation, NOTATIONS)
        self.file = file
        suffix = Path(file).suffix[1:].lower() if file else ""
        self.text = text_of(file) if file else str(text)
        self.notation = notation or (suffix if suffix in NOTATIONS else _notation_of(self.text))
        if self.notation == LARK:
            self._check_options()

    def _check_options(self) -> None:
        """Raises DataError for an option of llguidance that it would ignore."""
        for line in OPTIONS_LINE.finditer(self.text):
            try:
                given, _ = json.JSONDecoder().raw_decode(self.text, line.end())
            except (ValueError, RecursionError):
                continue  # llguidance says what is wrong
            for name in given:
                if name not in KNOWN_OPTIONS:
                    number = self.text.count("\n", 0, line.end()) + 1
                    known = f"known: {', '.join(KNOWN_OPTIONS)}"
                    fix = did_you_mean(name, KNOWN_OPTIONS, known)
                    option = f"unknown option {name!r:.80} of %llguidance"
                    raise DataError(self.explained(f"line {number}: {option}; {fix}"))

    def explained(self, message: str) -> str:
        where = "the grammar" if self.file is None else str(self.file)
        hint = ""
        if "no start rule" in message:
            hint = (
                "; name the first rule `start`" if self.notation == LARK else "; write `root ::=`"
            )
        return f"{where} cannot be used: {message}{hint}"

    def source(self) -> str:
        return self.text if self.notation == LARK else as_lark(self.text, self.notation)


def _notation_of(text: str) -> str:
    return GBNF if "::=" in text else LARK
