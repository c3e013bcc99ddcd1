"""STAND or a suffix tree, whichever pays for the sequence at hand.

STAND knows laws and wins where text is uncertain; the suffix tree copies long stretches at once and
wins where text repeats. See `forerun.drafters.router` for how the choice is made.
"""

from __future__ import annotations

from typing import Any

from forerun.drafters.router import Router
from forerun.registry import DrafterName
from forerun.roles import Drafter

PARTS = "stand:scope={}", "suffix:scope={}"


class Auto(Router):
    """The router over `parts`; without parts, over STAND and a suffix tree of the same `scope`."""

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] | None = None,
        scope: str = "group",
        tokenizer: Any = None,
    ) -> None:
        chosen = parts or tuple(part.format(scope) for part in PARTS)
        super().__init__(parts=chosen, scope=scope, tokenizer=tokenizer)
