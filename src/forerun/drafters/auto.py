"""STAND or a suffix tree, whichever pays for the text at hand; where there is one, a draft model.

STAND knows laws and wins where tokens are drawn; the suffix tree copies the longest stretch that
fits and wins where the likeliest token is taken; a draft model needs no earlier text and costs a
pass of its own for every token. That is what is believed at first; `forerun.drafters.router` finds
out what is true.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from forerun import registry
from forerun.core.mixins import Persistent
from forerun.core.records import Sequence
from forerun.core.roles import Drafter, Target
from forerun.drafters.router import OPTIMISM, Router
from forerun.errors import ConfigError, ForerunError
from forerun.models.draft_link import companion, shared_draft
from forerun.registry import DrafterName, ModelName

if TYPE_CHECKING:
    from forerun.runner.model_runner import ModelRunner

PARTS = "stand", "suffix"
OWN = "own"  # the draft model that comes with the model
# tokens of a step with STAND, a suffix tree and a draft model, where tokens are drawn and where
# they are not
BELIEFS = {False: (1.0, 0.85, 1.6), True: (1.0, 1.15, 1.6)}
SURE = 0.12  # optimism where STAND and a suffix tree are all: beliefs in them are nearly true
log = logging.getLogger("forerun")
_warned: WeakSet[Target] = WeakSet()


class Auto(Router):
    """The router over `parts`; STAND and a suffix tree are of its own `scope`.

    scope: who shares what is learned, of texts and of how the parts fare. model: a draft model of
    the same vocabulary, which competes with these two: a folder or hub id, "own" for the one that
    comes with the model, if any does (`models/draft_link.py`), None for none. optimism: the
    router's by default; less without a draft model, whose worth is the least certain. Raises
    ConfigError for a model beside other parts, and for another vocabulary; of one that nobody
    named only a warning.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] = PARTS,
        model: ModelName | None = OWN,
        scope: str = "tenant",
        run: int = 8,
        optimism: float | None = None,
        tokenizer: Any = None,
        target: Target | None = None,
    ) -> None:
        self.knows_parts = parts == PARTS
        if self.knows_parts:
            parts = tuple(f"{part}:scope={scope}" for part in PARTS)
            draft = _own(target, tokenizer) if model == OWN else model
            if draft and isinstance(draft, str) and target is not None:
                draft = shared_draft(target, draft, tokenizer)
            if draft:
                made = registry.make("drafter", "draft_model", model=draft, tokenizer=tokenizer)
                parts = (*parts, made)
        elif model not in (None, OWN):
            raise ConfigError(
                "auto takes a model beside its own parts alone; name it among the parts, as "
                "parts=stand+draft_model:model=draft"
            )
        if optimism is None:
            is_sure = self.knows_parts and len(parts) == len(PARTS)
            optimism = SURE if is_sure else OPTIMISM
        super().__init__(parts=parts, scope=scope, run=run, optimism=optimism, tokenizer=tokenizer)

    def _keeper(self, tenant: str) -> Persistent:
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

    def beliefs(self, seq: Sequence | None) -> Many[float]:
        if not self.knows_parts:
            return super().beliefs(seq)
        return BELIEFS[seq is not None and seq.sampling.is_greedy][: len(self.parts)]


def _own(target: Target | None, tokenizer: Any) -> ModelRunner | None:
    """The draft that comes with the model for which the tokenizer was loaded, if one does."""
    name = getattr(getattr(tokenizer, "inner", None), "name_or_path", "")
    if target is None or not name:
        return None
    try:
        draft = companion(Path(name))
        return None if draft is None else shared_draft(target, str(draft), tokenizer)
    except ForerunError as error:
        if target not in _warned:
            _warned.add(target)
            log.warning("auto goes on without the draft of this model: %s", error)
        return None
