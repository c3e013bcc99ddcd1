"""Block verification: a chain is judged as a whole, and never worse than token by token.

Sun et al., "Block Verification Accelerates Speculative Decoding", 2024. A token that the target
likes more than the draft does earns credit that a later, less liked token may use up: with
w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)) the longest prefix that passes its own coin is kept, and
P(at least i drafts are kept) = E[w_i]. A coin that fails earlier does not matter. Lossless.

Needs a chain: every node has at most one child. Trees, and chains where the rule cannot win (one
node, or chosen nodes only, whose ratios never exceed 1), are judged by recursive rejection.
"""

from __future__ import annotations

import numpy as np

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.tree import POINT, Tree
from forerun.verifiers.base import (
    NO_MASS,
    check_mass,
    first_flaw,
    follow_argmax,
    prob_of,
    refuse,
    reject_recursively,
)


class Block(Verifier):
    """Looks at the law of every node, down to the first that the target excludes."""

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        if laws.sampling.is_greedy:
            return follow_argmax(tree, laws)
        if not can_win(tree):
            return reject_recursively(tree, laws, dice)
        if why := first_flaw(tree, range(len(tree)), len(laws[-1])):
            refuse(why)
            return Verdict([], dice.choice(laws[-1]))
        return longest(tree, laws, block_weights(tree, laws), dice)


def can_win(tree: Tree) -> bool:
    """Whether this is a chain of two nodes or more, at least one of them drawn."""
    is_chain = np.array_equal(tree.parents, np.arange(-1, len(tree) - 1))
    return is_chain and len(tree) > 1 and bool((tree.laws != POINT).any())


def block_weights(tree: Tree, laws: TargetProbs) -> list[float]:
    """w_0 = 1, w_1, .. w_g of a chain, as far as they are positive."""
    weights = [1.0]
    for node, token in enumerate(tree.tokens):
        p, q = laws[node - 1], tree.q(node)
        check_mass(float(p.sum()), node)
        ratio = float(p[token]) / (1.0 if q is None else prob_of(q, int(token)))
        if ratio == 0.0:
            break
        weights.append(min(1.0, weights[-1] * ratio))
    return weights


def longest(tree: Tree, laws: TargetProbs, weights: list[float], dice: Dice) -> Verdict:
    """Keeps the longest prefix whose coin shows heads; coins are tossed from the end."""
    for kept in range(len(weights) - 1, -1, -1):
        weight, p = weights[kept], laws[kept - 1].astype(np.float64)
        if kept == len(tree):  # a bonus if all is kept
            if dice.coin(weight):
                return Verdict(list(range(kept)), dice.choice(p))
            continue
        left = owed(p, weight, tree, kept)
        if kept == 0 or dice.coin(heads(weight, float(left.sum()))):
            return Verdict(list(range(kept)), dice.choice(left if left.sum() > NO_MASS else p))
    raise AssertionError("the empty prefix is always kept")


def owed(p: np.ndarray, weight: float, tree: Tree, child: int) -> np.ndarray:
    """(w p - q)+ [V] with the q of the node that follows: what its acceptance does not pay."""
    left, q = weight * p, tree.q(child)
    if q is None:
        left[tree.tokens[child]] -= 1.0
    else:
        left[q.ids] -= q.probs / q.probs.sum()
    return np.maximum(left, 0.0, out=left)


def heads(weight: float, mass: float) -> float:
    """h = S / (S + 1 - w), where S is the mass owed; 1 where both are 0."""
    return mass / (mass + 1.0 - weight) if mass + 1.0 - weight > 0 else 1.0
