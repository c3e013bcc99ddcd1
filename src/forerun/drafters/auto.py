"""STAND or a suffix tree, whichever pays for the text at hand; with a draft model, that too.

STAND knows laws and wins where tokens are drawn; the suffix tree copies the longest stretch that
fits and wins where the likeliest token is taken; a draft model needs no earlier text. That is what
is believed at first; `forerun.drafters.router` finds out what is true.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from forerun import registry
from forerun.drafters.router import Router
from forerun.errors import ConfigError
from forerun.records import Sequence
from forerun.registry import DrafterName, ModelName
from forerun.roles import Drafter

PARTS = "stand", "suffix"
# how fast STAND, a suffix tree and a draft model are, where tokens are drawn and where they are not
BELIEFS = {False: (1.0, 0.85, 1.2), True: (1.0, 1.15, 1.2)}


class Auto(Router):
    """The router over `parts`; STAND and a suffix tree are of its own `scope`.

    scope: who shares what is learned, of texts and of how the parts fare. model: a draft model of
    the same vocabulary, which competes with these two. Raises ConfigError for one beside other
    parts.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] = PARTS,
        model: ModelName | None = None,
        scope: str = "tenant",
        run: int = 8,
        optimism: float = 0.12,
        tokenizer: Any = None,
    ) -> None:
        self.knows_parts = parts == PARTS
        if self.knows_parts:
            parts = tuple(f"{part}:scope={scope}" for part in PARTS)
        elif model:
            raise ConfigError(
                "auto takes a model beside its own parts alone; name it among the parts, as "
                "parts=stand+draft_model:model=draft"
            )
        if model:
            parts = (
                *parts,
                registry.make("drafter", "draft_model", model=model, tokenizer=tokenizer),
            )
        super().__init__(parts=parts, scope=scope, run=run, optimism=optimism, tokenizer=tokenizer)

    def _keeper(self, tenant: str) -> Drafter:
        try:
            return super()._keeper(tenant)
        except ConfigError as error:
            if not self.knows_parts:
                raise
            owner = f" for tenant {tenant!r}" if tenant else ""
            raise ConfigError(
                f"what auto learns in scope {self.scope} cannot be saved{owner}; use "
                "auto:scope=tenant"
            ) from error

    def beliefs(self, seq: Sequence) -> Many[float]:
        if not self.knows_parts:
            return super().beliefs(seq)
        return BELIEFS[seq.sampling.is_greedy][: len(self.parts)]
