"""Lenient rejection: accepts draft tokens more often than the exact rule, by a function f >= p.

Zhou et al., "DistillSpec: Improving Speculative Decoding via Knowledge Distillation", 2024. A token
x drawn from q is accepted with probability min(1, f(p(x)) / q(x)) with f = p / eps (lin),
p / eps^2 (sq) or p^eps (exp). After a rejection p becomes norm[(p - q)+], as in `recursive`, and
further siblings are tried against that. At temperature 0 a child x is accepted if it is the argmax
or f(p1(x)) >= max p1, where p1 is the distribution at temperature 1.

Law: NOT kept, except at eps = 1, where the outcomes are those of `recursive`. `law` is the output
distribution of one draft. Tokens of probability 0 are never accepted, so constraints hold.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.sampling import log_softmax
from forerun.core.tree import Tree
from forerun.errors import ConfigError
from forerun.verifiers.base import follow_argmax, reject_recursively, residual

KINDS = "lin", "sq", "exp"


class Lenient(Verifier):
    """kind: lin, sq or exp; eps: from 1 (exact) towards 0 (accepts every possible token)."""

    lossless = False

    def __init__(self, *, kind: str = "lin", eps: float = 0.5) -> None:
        if kind not in KINDS or not 0 < eps <= 1:
            raise ConfigError(
                f"lenient needs kind lin, sq or exp and 0 < eps <= 1, got {kind=} and {eps=}; for "
                "an exact rule use 'speculative'"
            )
        self.kind, self.eps = kind, eps

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        if not laws.sampling.is_greedy:
            return reject_recursively(
                tree, laws, dice, relax=lambda p: float(relaxed(p, self.kind, self.eps))
            )
        if self.eps == 1:
            return follow_argmax(tree, laws)
        return follow_argmax(tree, laws, lambda node: self._is_close(tree, laws, node))

    def _is_close(self, tree: Tree, laws: TargetProbs, node: int) -> bool:
        """Whether f(p1(x)) >= max p1 for the token x of a node."""
        p1 = np.exp(log_softmax(laws.logits(int(tree.parents[node]))))
        return bool(relaxed(p1[tree.tokens[node]], self.kind, self.eps) >= p1.max())


def relaxed(p: np.ndarray | float, kind: str, eps: float) -> np.ndarray | float:
    """f(p) >= p of a kind; p itself at eps = 1."""
    if kind == "exp":
        return p**eps
    return p / (eps if kind == "lin" else eps**2)


def acceptance(p: np.ndarray, q: np.ndarray, kind: str, eps: float) -> float:
    """sum min(q, f(p)) of p and q [V]: the acceptance rate of one draft from q."""
    return float(np.minimum(q, relaxed(p, kind, eps)).sum())


def law(p: np.ndarray, q: np.ndarray, kind: str, eps: float) -> np.ndarray:
    """Distribution [V] of the first emitted token after one draft from q.

    min(q, f(p)) + (1 - sum min(q, f(p))) norm[(p - q)+].
    """
    accepted = np.minimum(q, relaxed(p, kind, eps))
    return accepted + (1 - accepted.sum()) * residual(p, q)


def distance(p: np.ndarray, q: np.ndarray, kind: str, eps: float) -> float:
    """Total variation between p and `law`."""
    return float(math.fsum(np.abs(law(p, q, kind, eps) - p))) / 2
