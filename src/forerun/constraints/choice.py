"""One of several texts."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many

from forerun.constraints._grammar_constraint import GrammarConstraint
from forerun.errors import ConfigError


class Choice(GrammarConstraint):
    """Allows the texts `options`; in text they are joined by `|`: "yes|no"."""

    def __init__(self, options: str | Many[str]) -> None:
        given = options.split("|") if isinstance(options, str) else list(options)
        if not given or not all(isinstance(one, str) and one for one in given):
            raise ConfigError(
                f"a choice needs one or more texts that are not empty, got {options!r:.80}"
            )
        self.options = tuple(dict.fromkeys(given))

    def source(self) -> str:
        written = " | ".join(json.dumps(one, ensure_ascii=False) for one in self.options)
        return f"start: TEXT\nTEXT: {written}"  # as rules, at most 2000 options would compile
