"""Typical acceptance: a draft token is kept if its target probability passes a threshold.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
2024. A node is kept if its parent is kept and p(x) > min(epsilon, delta exp(-H(p))), H the entropy
of p in nats. The longest kept path is accepted, the most likely one on ties, and one more token is
drawn from p. q is not used, so any draft can be verified, and the output is biased towards the
drafter. At temperature 0 it follows the argmax.

Law: NOT kept. One drawn draft gives x with q(x) [x is typical] + q(not typical) p(x) instead of
p(x). Tokens of probability 0 are never kept, so constraints hold.
"""

from __future__ import annotations

import numpy as np

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.tree import Tree
from forerun.errors import ConfigError
from forerun.verifiers.base import check_mass, follow_argmax


class Typical(Verifier):
    """epsilon: the threshold if p is peaked; delta: its scale if p is flat."""

    lossless = False

    def __init__(self, *, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not (0 < epsilon < 1 and delta > 0):
            raise ConfigError(
                f"typical needs 0 < epsilon < 1 and delta > 0, got {epsilon=} and {delta=}; the "
                "paper has epsilon=0.09, delta=0.3; for an exact rule use 'speculative'"
            )
        self.epsilon, self.delta = epsilon, delta

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        if laws.sampling.is_greedy:
            return follow_argmax(tree, laws)
        path = best_path(tree, self.kept(tree, laws))
        p = laws[path[-1] if path else -1]
        check_mass(float(p.sum()), len(path))
        return Verdict(path, dice.choice(p))

    def kept(self, tree: Tree, laws: TargetProbs) -> dict[int, float]:
        """The kept nodes with the log-probability of their path."""
        logps, thresholds = {-1: 0.0}, dict[int, float]()
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            parent = int(parent)
            if parent not in logps:
                continue
            p = laws[parent]
            if parent not in thresholds:
                check_mass(float(p.sum()), 0)
                thresholds[parent] = self.threshold(p)
            if p[token] > thresholds[parent]:
                logps[node] = logps[parent] + float(np.log(p[token]))
        del logps[-1]
        return logps

    def threshold(self, p: np.ndarray) -> float:
        """min(epsilon, delta exp(-H)) for p [V]: tokens above it are typical."""
        return min(self.epsilon, self.delta * float(np.exp(-entropy(p))))


def entropy(p: np.ndarray) -> float:
    """Entropy of p [V] in nats."""
    held = p[p > 0].astype(np.float64)
    return -float(held @ np.log(held))


def best_path(tree: Tree, logps: dict[int, float]) -> list[int]:
    """The path to the deepest kept node; the most likely on ties, then the first."""
    if not logps:
        return []
    node = max(logps, key=lambda n: (int(tree.depths[n]), logps[n], -n))
    path = list[int]()
    while node >= 0:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]
