"""Acceptance of each verification rule for k candidates at one position, in closed form.

p [V] and q [V] are float64 distributions that sum to 1. The optimum over all rules is in
`forerun.bench.optimum`. Draws without replacement have no closed form in k: acceptance is averaged
over drawn tuples, exact for each tuple.
"""

from __future__ import annotations

import numpy as np

from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.tree import Tree
from forerun.verifiers.base import prob_of, residual
from forerun.verifiers.block import block_weights
from forerun.verifiers.k_seq import k_seq

NUM_TUPLES = 16  # drawn for an average


def single(p: np.ndarray, q: np.ndarray, k: int = 1) -> float:
    """One draft: sum min(p, q)."""
    return float(np.minimum(p, q).sum())


def matched(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """Draw from p and match it with k i.i.d. drafts: sum p (1 - (1 - q)^k)."""
    return float((p * (1 - (1 - q) ** k)).sum())


def with_replacement(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """Recursive rejection of k i.i.d. drafts: 1 - prod (1 - sum min(r_i, q))."""
    failed = 1.0
    for _ in range(k):
        failed *= 1 - np.minimum(p, q).sum()
        p = residual(p, q)
    return float(1 - failed)


def without_replacement(
    p: np.ndarray, q: np.ndarray, k: int, dice: SeededDice | None = None, tuples: int = NUM_TUPLES
) -> float:
    """Recursive rejection of k draws without replacement, averaged over drawn tuples."""
    dice = dice or SeededDice(0)
    drawn = (dice.without_replacement(q, k) for _ in range(tuples))
    return float(np.mean([given_tuple(p, q, tokens) for tokens in drawn]))


def given_tuple(p: np.ndarray, q: np.ndarray, tokens: list[int]) -> float:
    """Probability that one of these draws without replacement is accepted."""
    failed, q = 1.0, q.copy()
    for x in tokens:
        failed *= 1 - min(1.0, p[x] / q[x])
        if failed == 0.0:
            break
        p = residual(p, q)
        q[x] = 0.0
        q /= q.sum() or 1.0
    return 1 - failed


def by_k_seq(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """k-SEQ with the smallest valid factor: 1 - (1 - beta)^k."""
    on = q > 0
    return k_seq(p[on], q[on], k).accepted


def chain_weights(rule: str, tree: Tree, laws: TargetProbs) -> list[float]:
    """Probability that at least 1, 2, ... drafts of a drawn chain are accepted, given the chain.

    rule: "block", "match", or any other name for token-by-token rejection.
    """
    if rule == "block":
        return block_weights(tree, laws)[1:]
    return list(np.cumprod([_share(rule, tree, laws, node) for node in range(len(tree))]))


def _share(rule: str, tree: Tree, laws: TargetProbs, node: int) -> float:
    token, q = int(tree.tokens[node]), tree.q(node)
    p = float(laws[node - 1][token])
    return p if rule == "match" else min(1.0, p / (prob_of(q, token) if q else 1.0))
