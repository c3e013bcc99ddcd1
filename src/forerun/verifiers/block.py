"""Block verification: a chain is verified as a whole, never worse than token by token.

Sun et al., "Block Verification Accelerates Speculative Decoding", 2024. A token with p > q earns
credit for a later token with p < q: w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)). The longest prefix
that passes its own coin is kept, even if a shorter one failed. P(at least i drafts are kept) =
E[w_i]. Lossless.

Needs a chain: every node has at most one child. Trees, single nodes, and chains of chosen nodes
only (their ratios never exceed 1) are verified by recursive rejection.
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
    first_draft_error,
    follow_argmax,
    prob_of,
    reject_invalid,
    reject_recursively,
)


class Block(Verifier):
    """Reads the target distribution at every node, down to the first with p = 0."""

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        if laws.sampling.is_greedy:
            return follow_argmax(tree, laws)
        if not can_win(tree):
            return reject_recursively(tree, laws, dice)
        if why := first_draft_error(tree, range(len(tree)), len(laws[-1])):
            reject_invalid(why)
            return Verdict([], dice.choice(laws[-1]))
        return longest(tree, laws, block_weights(tree, laws), dice)


def can_win(tree: Tree) -> bool:
    """Whether this is a chain of at least two nodes, at least one of them drawn."""
    is_chain = np.array_equal(tree.parents, np.arange(-1, len(tree) - 1))
    return is_chain and len(tree) > 1 and bool((tree.laws != POINT).any())


def block_weights(tree: Tree, laws: TargetProbs) -> list[float]:
    """w_0 = 1, w_1, .. w_g of a chain, up to the last positive one."""
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
    """Keeps the longest prefix that passes its coin, tried from the longest to the shortest."""
    for kept in range(len(weights) - 1, -1, -1):
        weight, p = weights[kept], laws[kept - 1].astype(np.float64)
        if kept == len(tree):  # all accepted: a bonus token
            if dice.coin(weight):
                return Verdict(list(range(kept)), dice.choice(p))
            continue
        left = residual(p, weight, tree, kept)
        if kept == 0 or dice.coin(stop_probability(weight, float(left.sum()))):
            return Verdict(list(range(kept)), dice.choice(left if left.sum() > NO_MASS else p))
    raise AssertionError("the empty prefix is always kept")


def residual(p: np.ndarray, weight: float, tree: Tree, child: int) -> np.ndarray:
    """(w p - q)+ [V] with the q of the next node, not normalised."""
    left, q = weight * p, tree.q(child)
    if q is None:
        left[tree.tokens[child]] -= 1.0
    else:
        left[q.ids] -= q.probs / q.probs.sum()
    return np.maximum(left, 0.0, out=left)


def stop_probability(weight: float, mass: float) -> float:
    """h = S / (S + 1 - w), S the mass of the residual; 1 if both are 0."""
    return mass / (mass + 1.0 - weight) if mass + 1.0 - weight > 0 else 1.0
