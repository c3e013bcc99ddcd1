"""The default: STAND or a suffix tree, whichever pays for the sequence at hand.

STAND knows laws and wins where text is uncertain; the suffix tree copies long stretches at once and
wins where text repeats. See `forerun.drafters.router` for how the choice is made.
"""

from __future__ import annotations

from typing import Any

from forerun.drafters.router import Router


class Auto(Router):
    """The router over `parts`."""

    def __init__(self, *, parts: tuple[Any, ...] = ("stand", "suffix"), tokenizer: Any = None):
        super().__init__(parts=parts, tokenizer=tokenizer)
