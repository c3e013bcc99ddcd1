"""A smaller model drafts, the target verifies: speculative sampling as first published.

Leviathan et al. 2023; Chen et al. 2023. Any grower turns its distribution into a chain or a tree.
Lossless with a verifier that judges the grower's draws. Needs a model with the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from forerun import registry
from forerun.dice import Dice
from forerun.drafters.base import Grown
from forerun.errors import ConfigError
from forerun.passes import curve_of
from forerun.records import Plan, Sequence
from forerun.registry import GrowerName, ModelName
from forerun.roles import Path, Source, Target
from forerun.sampling import softmax, to_probs
from forerun.tree import Proposal, Tree

if TYPE_CHECKING:
    from forerun.engine.runner import ModelRunner
    from forerun.models.tokenizer import Tokenizer


class DraftModel(Grown):
    """`model` is a folder, a hub id or a loaded runner; `grower` is a registered name.

    Raises ConfigError when the draft's vocabulary is not the target's.
    """

    def __init__(
        self,
        *,
        model: ModelName | ModelRunner,
        grower: GrowerName = "chain",
        dtype: str = "auto",
        device: str = "auto",
        max_seqs: int = 256,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        made = registry.make("grower", grower)
        if isinstance(model, str):
            model = _load(model, dtype, device, max_seqs, tokenizer)
        self.source: ModelSource
        super().__init__(ModelSource(model, is_tree=grower != "chain"), made)
        self.runner = model

    def bind(self, target: Target) -> None:
        if self.runner.vocab_size < target.vocab_size:
            raise ConfigError(
                f"the draft has {self.runner.vocab_size} logits, the target "
                f"{target.vocab_size}; use a draft of the same family"
            )
        self.source.vocab_size = target.vocab_size

    def seconds(self, nodes: int, num: int = 1) -> float:
        """A pass of the draft for every node of a chain; a tree is taken for half as deep."""
        rows = 1 + self.source.is_tree
        one = float(curve_of(self.runner).at(rows * num)) / num
        return nodes / rows * one

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        return super().propose_one(seq, self._cap(seq, plan), dice)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        return super().propose(seqs, [self._cap(*pair) for pair in zip(seqs, plans, strict=True)])

    def finish(self, seq: Sequence) -> None:
        self.runner.release(seq)

    def memory_report(self) -> dict[str, int]:
        return {f"draft {part}": size for part, size in self.runner.memory_report().items()}

    def _cap(self, seq: Sequence, plan: Plan) -> Plan:
        """The plan within the draft's own context, which may be shorter than the target's."""
        return plan.within(self.runner.context - len(seq.tokens))


class ModelSource(Source):
    """q is the draft's law under the request's own temperature and truncation.

    A greedy request makes that a unit mass: right for a chain, but a tree would have one child per
    node, so trees then use the law at temperature 1.
    """

    def __init__(self, runner: ModelRunner, is_tree: bool) -> None:
        self.runner, self.is_tree = runner, is_tree
        self.vocab_size = runner.vocab_size  # the target's, once it is known: rows may be padded

    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        logits = self.runner.rows_at(requests)
        wide = (logits.float() if logits.element_size() < 4 else logits).cpu().numpy()
        rows = wide[:, : self.vocab_size]
        return [self._law(seq, row) for (seq, _), row in zip(requests, rows, strict=True)]

    def _law(self, seq: Sequence, logits: np.ndarray) -> Proposal:
        if seq.sampling.is_greedy and self.is_tree:
            return _normalised(softmax(logits))
        return _normalised(to_probs(logits, seq.sampling))


def _normalised(probs: np.ndarray) -> Proposal:
    """float64, so that the ratio p / q sees exactly what was drawn from."""
    wide = probs.astype(np.float64)
    return Proposal.of(wide / wide.sum())


def _load(
    name: str, dtype: str, device: str, max_seqs: int, tokenizer: Tokenizer | None
) -> ModelRunner:
    from forerun.assets import embedded
    from forerun.models.load import load_target
    from forerun.models.tokenizer import Tokenizer

    path = embedded(name)
    if tokenizer is not None:
        check_vocabulary(tokenizer, Tokenizer.load(path))
    return load_target(path, dtype=dtype, device=device, max_seqs=max_seqs)  # type: ignore[return-value]


def check_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises ConfigError unless both map the same token strings to the same ids."""
    ours, theirs = target.vocabulary(), draft.vocabulary()
    if ours != theirs:
        differ = sum(ours.get(token) != i for token, i in theirs.items())
        raise ConfigError(
            f"the draft has another vocabulary than the target ({len(theirs)} and {len(ours)} "
            f"tokens, {differ} differ); use a draft of the same family, or drafter 'stand'"
        )
