"""The default drafter: a router over STAND, a suffix tree and, if available, a draft model.

STAND learns distributions, which suits sampling. The suffix tree copies the longest match, which
suits greedy decoding. A draft model needs no earlier text but one forward pass per token. The
expected tokens below encode this; `forerun.drafters.router` replaces them by measurements.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.mixins import Persistent
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Drafter, Target
from forerun.core.tree import Tree
from forerun.drafters.forced import forced_chain
from forerun.drafters.fuse import merge
from forerun.drafters.router import OPTIMISM, Router
from forerun.errors import ConfigError, ForerunError
from forerun.models.draft_link import companion, shared_draft
from forerun.registry import DrafterName, ModelName

if TYPE_CHECKING:
    from forerun.runner.model_runner import ModelRunner

DEFAULT_PARTS = "stand", "suffix"
PART_OPTIONS = {"stand": ",copy_prompt=true", "suffix": ""}  # the suffix tree copies prompts anyway
FORCED = "forced"  # name of forced tokens in statistics
OWN_DRAFT = "own"  # the draft model that comes with the model
# by greedy: tokens per step with STAND, a suffix tree and a draft model, relative to STAND
EXPECTED_TOKENS = {False: (1.0, 0.85, 1.6), True: (1.0, 1.15, 1.6)}
MODEL_FREE_OPTIMISM = 0.12  # without a draft model, since the expected tokens are then accurate
log = logging.getLogger("forerun")
_warned: WeakSet[Target] = WeakSet()


class Auto(Router):
    """The router over `parts`; STAND and the suffix tree get its `scope`.

    scope: which sequences share learned state and speed records. model: a draft model with the same
    vocabulary: a folder or hub id, "own" for the one that the model's folder names
    (`models/draft_link.py`), or None. optimism: default that of the router, less without a draft
    model. Raises ConfigError for a model together with other parts, and for a draft model with
    another vocabulary; for "own" that is a warning.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] = DEFAULT_PARTS,
        model: ModelName | None = OWN_DRAFT,
        scope: str = "tenant",
        run: int = 8,
        optimism: float | None = None,
        tokenizer: Any = None,
        target: Target | None = None,
    ) -> None:
        self.has_default_parts = parts == DEFAULT_PARTS
        if self.has_default_parts:
            parts = tuple(f"{part}:scope={scope}{PART_OPTIONS[part]}" for part in DEFAULT_PARTS)
            draft = _own_draft(target, tokenizer) if model == OWN_DRAFT else model
            if draft and isinstance(draft, str) and target is not None:
                draft = shared_draft(target, draft, tokenizer)
            if draft:
                made = registry.make("drafter", "draft_model", model=draft, tokenizer=tokenizer)
                parts = (*parts, made)
        elif model not in (None, OWN_DRAFT):
            raise ConfigError(
                "auto takes the option model only with its default parts; add it to the parts: "
                "parts=stand+draft_model:model=draft"
            )
        if optimism is None:
            is_model_free = self.has_default_parts and len(parts) == len(DEFAULT_PARTS)
            optimism = MODEL_FREE_OPTIMISM if is_model_free else OPTIMISM
        super().__init__(parts=parts, scope=scope, run=run, optimism=optimism, tokenizer=tokenizer)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        """The drafts of the parts, with the tokens that a constraint forces."""
        forced = [forced_chain(*pair) for pair in zip(seqs, plans, strict=True)]
        left = [
            plan.sized(plan.nodes - len(chain)) for plan, chain in zip(plans, forced, strict=True)
        ]
        trees = super().propose(seqs, left, dice)
        pairs = zip(forced, trees, strict=True)
        return [merge([chain, tree], (FORCED, "")) if len(chain) else tree for chain, tree in pairs]

    def _keeper(self, tenant: str) -> Persistent:
        try:
            return super()._keeper(tenant)
        except ConfigError as error:
            if not self.has_default_parts:
                raise
            owner = f" for tenant {tenant!r}" if tenant else ""
            raise ConfigError(
                f"what auto learns in scope {self.scope} cannot be saved{owner}; use "
                "auto:scope=tenant"
            ) from error

    def expected_tokens(self, seq: Sequence | None) -> Many[float]:
        if not self.has_default_parts:
            return super().expected_tokens(seq)
        return EXPECTED_TOKENS[seq is not None and seq.sampling.is_greedy][: len(self.parts)]


def _own_draft(target: Target | None, tokenizer: Any) -> ModelRunner | None:
    """The draft model that the folder of the tokenizer names, if any."""
    name = getattr(getattr(tokenizer, "inner", None), "name_or_path", "")
    if target is None or not name:
        return None
    try:
        draft = companion(Path(name))
        return None if draft is None else shared_draft(target, str(draft), tokenizer)
    except ForerunError as error:
        if target not in _warned:
            _warned.add(target)
            log.warning("auto runs without the draft model of this model: %s", error)
        return None
