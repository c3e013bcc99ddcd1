"""Recursive rejection over a tree, written plainly: the oracle of every faster exact verifier.

Walk from the root. At a node with target law p, try its children in the order drawn: accept child x
with probability min(1, p(x) / q(x)), where q is the law of x given that its earlier siblings were
rejected; after a rejection p becomes norm[(p - q)+]. When no child is left, emit a token from what
p has become. Every emitted token then has law p: P(accept x) + P(reject) norm[(p - q)+](x) = p(x).

Miao et al., "SpecInfer", 2023; Jeon et al., "Recursive Speculative Decoding", 2024. Lossless.
"""

from __future__ import annotations

import numpy as np

from forerun.dice import Dice
from forerun.roles import Verifier
from forerun.records import Verdict
from forerun.shaping import Laws
from forerun.tree import Tree


class Recursive(Verifier):
    """Dense, in float64, O(V) for every child tried."""

    def verify(self, tree: Tree, laws: Laws, dice: Dice) -> Verdict:
        node, kept = -1, []
        while True:
            p = laws[node].astype(np.float64)
            for child in tree.children(node):
                q, x = tree.proposal(child, len(p)), tree.tokens[child]
                assert q[x] > 0, "a drawn token has q = 0: the drafter is wrong"
                if dice.coin(min(1.0, p[x] / q[x])):
                    node = child
                    kept.append(child)
                    break
                p = residual(p, q)
            else:
                return Verdict(kept, dice.choice(p))


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """norm[(p - q)+]; p itself where p = q up to rounding, as a rejection then had no chance."""
    left = np.maximum(p - q, 0.0)
    mass = left.sum()
    return left / mass if mass > 1e-12 else p
