"""STAND or a suffix tree, whichever pays for the sequence at hand; with a draft model, that too.

STAND knows laws and wins where text is uncertain; the suffix tree copies long stretches at once and
wins where text repeats; a draft model needs no earlier text. See `forerun.drafters.router` and
`forerun.drafters.bandit` for how the choices are made.
"""

from __future__ import annotations

from typing import Any

from forerun import registry
from forerun.drafters.bandit import Bandit
from forerun.drafters.router import Router
from forerun.errors import ConfigError
from forerun.registry import DrafterName, ModelName
from forerun.roles import Drafter


class Auto(Router):
    """The router over `parts`; without parts, over STAND and a suffix tree of the same `scope`.

    model: a draft model of the same vocabulary, which competes with STAND. Raises ConfigError for
    both `parts` and `model`.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] | None = None,
        model: ModelName | None = None,
        scope: str = "group",
        tokenizer: Any = None,
    ) -> None:
        if parts and model:
            raise ConfigError("auto takes parts or a draft model, not both; put it among the parts")
        super().__init__(
            parts=parts or _parts(model, scope, tokenizer), scope=scope, tokenizer=tokenizer
        )


def _parts(
    model: ModelName | None, scope: str, tokenizer: Any
) -> tuple[DrafterName | Drafter, ...]:
    stand, suffix = f"stand:scope={scope}", f"suffix:scope={scope}"
    if model is None:
        return stand, suffix
    draft = registry.make("drafter", "draft_model", model=model, tokenizer=tokenizer)
    return Bandit(parts=(draft, stand), scope=scope, tokenizer=tokenizer), suffix
