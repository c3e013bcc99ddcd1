"""Greedy verification at temperature 0: follow the argmax as far as the tree contains it.

The target distribution is a unit mass, so a child is accepted exactly if it is the argmax (lowest
id on ties). Stern et al., "Blockwise Parallel Decoding", 2018. Lossless.
"""

from __future__ import annotations

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.errors import ConfigError
from forerun.verifiers.base import ALL_LABELS, follow_argmax


class Greedy(Verifier):
    """No softmax and no random number; for greedy requests only."""

    judges = ALL_LABELS

    def check(self, sampling: Sampling) -> None:
        if not sampling.is_greedy:
            raise ConfigError(
                f"verifier 'greedy' needs temperature 0, got {sampling.temperature}; "
                "use verifier 'speculative'"
            )

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        return follow_argmax(tree, laws)
