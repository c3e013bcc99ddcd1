"""Texts of a context-free grammar in Lark, GBNF or EBNF notation.

GBNF is llama.cpp's notation, EBNF that of transformers-cfg (`root ::= ...`). Both are converted to
Lark in the dialect of llguidance.
"""

from __future__ import annotations

from pathlib import Path

from forerun.constraints._gbnf import as_lark
from forerun.constraints._grammar_constraint import GrammarConstraint, text_of
from forerun.errors import ConfigError, UnknownName
from forerun.registry import File

LARK, GBNF, EBNF = "lark", "gbnf", "ebnf"
NOTATIONS = (LARK, GBNF, EBNF)


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
        suffix = Path(file).suffix[1:].lower() if file else ""
        self.text = text_of(file) if file else str(text)
        self.notation = notation or (suffix if suffix in NOTATIONS else _notation_of(self.text))

    def source(self) -> str:
        return self.text if self.notation == LARK else as_lark(self.text, self.notation)


def _notation_of(text: str) -> str:
    return GBNF if "::=" in text else LARK
