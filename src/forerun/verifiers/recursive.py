"""Recursive rejection over a tree: the reference for every faster exact verifier.

Walk from the root. At a node with target distribution p, try its children in the order drawn.
Accept child x with probability min(1, p(x) / q(x)), where q is the distribution of x given that its
earlier siblings were rejected. After a rejection p becomes norm[(p - q)+]. If no child is accepted,
draw a token from the last p. Every emitted token then has distribution p, because
P(accept x) + P(reject) norm[(p - q)+](x) = p(x).

Miao et al., "SpecInfer", 2023; Jeon et al., "Recursive Speculative Decoding", 2024. Lossless.
"""

from __future__ import annotations

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.tree import Tree
from forerun.verifiers.base import ALL_LABELS, reject_recursively


class Recursive(Verifier):
    """Dense, in float64, O(V) for every child tried."""

    judges = ALL_LABELS

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        return reject_recursively(tree, laws, dice)
