"""A smaller model drafts, the target verifies: speculative sampling as first published.

Leviathan et al. 2023; Chen et al. 2023. Any grower turns its distribution into a chain or a tree.
Exact with a verifier that supports the grower's labels. Needs a model with the target's vocabulary;
the number of padded rows may differ. Of a sorted draft (Kavehzadeh et al., S2D, 2024) the first
layers draft that suit the target, or as many as each token needs.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Target
from forerun.core.tree import Tree
from forerun.drafters._draft_runner import ModelDrafter, ModelSource, within_context
from forerun.drafters._sub_model import fitting
from forerun.drafters._token_exits import ExitSource
from forerun.drafters.base import Grown
from forerun.errors import ConfigError
from forerun.models.draft_link import check_size, load_draft
from forerun.models.sub_models import Exits, sub_runner
from forerun.registry import GrowerName, ModelName

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer
    from forerun.runner.model_runner import ModelRunner


class DraftModel(Grown, ModelDrafter):
    """`model` is a folder, a hub id or a loaded runner; `grower` is a registered name.

    layers: how many first layers of the model draft. "auto" takes the fastest sub-model of a sorted
    draft, and all layers of others. confidence: of a sorted draft, each token is drawn from the
    first sub-model with a probability above it; None: all tokens from one sub-model.
    Raises ConfigError when the draft's vocabulary is not the target's.
    """

    can_observe_late = True

    def __init__(
        self,
        *,
        model: ModelName | ModelRunner,
        grower: GrowerName = "chain",
        layers: int | str = "auto",
        confidence: float | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_seqs: int = 256,
        tokenizer: Tokenizer | None = None,
        target: Target | None = None,
    ) -> None:
        made = registry.make("grower", grower)
        if isinstance(model, str):
            model = load_draft(model, dtype, device, max_seqs, tokenizer, target)
        if not isinstance(layers, int) and layers != "auto":
            raise ConfigError(f"layers must be auto or a whole number, got {layers!r}")
        self.is_tree = grower != "chain"
        is_chosen = layers == "auto" and confidence is None  # the depth, when the target is known
        self._exits: Exits | None = getattr(model, "exits", None) if is_chosen else None
        self.source: ModelSource = _source(model, layers, confidence, self.is_tree)
        ModelDrafter.__init__(self, self.source.inner)
        Grown.__init__(self, self.source, made)
        self._tokenizer = tokenizer

    def bind(self, target: Target) -> None:
        check_size(self.runner, target, self._tokenizer)
        if self._exits is not None:
            self.runner = fitting(self.runner, self._exits, target)
            self.source = ModelSource(self.runner, self.is_tree)
            self._exits = None  # one target per drafter
        self.source.fit(target.vocab_size)
        if isinstance(self.source, ExitSource):
            self.passes = self.source.passes_per_token()
        self.begin_costs()

    def catch_up_seconds(self, seq: Sequence) -> float:
        return self.catch_up(seq, self.source.num_unread(seq))

    def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
        """Typical acceptance of model pairs of one family, the second lower: a chain is nested."""
        return 0.7, 0.7

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        self.note_read(seqs)
        pairs = zip(seqs, plans, strict=True)
        capped = [within_context(self.runner, seq, plan) for seq, plan in pairs]
        return super().propose(seqs, capped, dice)

    def observe(self, step: Step) -> None:
        super().observe(step)
        self.measure_costs()

    def finish(self, seq: Sequence) -> None:
        self.source.release(seq)


def _source(
    model: ModelRunner, layers: int | str, confidence: float | None, is_tree: bool
) -> ModelSource:
    """What gives q: the whole model, its first layers, or a sub-model for each token."""
    if confidence is not None:
        return ExitSource.of(model, layers, confidence, is_tree)
    return ModelSource(sub_runner(model, layers) if isinstance(layers, int) else model, is_tree)
