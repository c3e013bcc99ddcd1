"""STAND or a suffix tree, whichever pays for the text at hand; with a draft model, that too.

STAND knows laws and wins where tokens are drawn; the suffix tree copies the longest stretch that
fits and wins where the likeliest token is taken; a draft model needs no earlier text. That is what
is believed at first; `forerun.drafters.router` finds out what is true.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from forerun.drafters.draft_model import DraftModel
from forerun.drafters.router import Router
from forerun.drafters.suffix import Suffix
from forerun.errors import ConfigError
from forerun.records import Sequence
from forerun.registry import DrafterName, ModelName
from forerun.roles import Drafter

# beliefs, beside STAND's 1: in a suffix tree where tokens are drawn, where they are not; in a draft
COPIES, DRAFT = (0.85, 1.15), 1.2


class Auto(Router):
    """The router over `parts`; without parts, over STAND and a suffix tree of the same `scope`.

    model: a draft model of the same vocabulary, which competes too. Raises ConfigError for both
    `parts` and `model`.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] | None = None,
        model: ModelName | None = None,
        scope: str = "group",
        run: int = 8,
        optimism: float = 0.12,
        tokenizer: Any = None,
    ) -> None:
        if parts and model:
            raise ConfigError("auto takes parts or a draft model, not both; put it among the parts")
        if not parts:
            parts = f"stand:scope={scope}", f"suffix:scope={scope}"
        if model:
            parts = DraftModel(model=model, tokenizer=tokenizer), *parts
        super().__init__(parts=parts, scope=scope, run=run, optimism=optimism, tokenizer=tokenizer)

    def beliefs(self, seq: Sequence) -> Many[float]:
        copies = COPIES[seq.sampling.is_greedy]
        known = {Suffix: copies, DraftModel: DRAFT}
        return [known.get(type(part), 1.0) for part in self.parts]
