"""What verifiers share."""

from __future__ import annotations

import math

import numpy as np

from forerun.dice import Dice
from forerun.errors import ConfigError
from forerun.records import Verdict
from forerun.sampling import argmax
from forerun.shaping import Laws
from forerun.tree import Tree

NO_MASS = 1e-12  # a residual below this share of its law is rounding error


def follow_argmax(tree: Tree, laws: Laws) -> Verdict:
    """Descends while a child holds the argmax of its parent's shaped logits."""
    node, kept = -1, list[int]()
    while True:
        token = argmax(laws.logits(node))
        hits = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if not len(hits):
            return Verdict(kept, token)
        node = int(hits[0])
        kept.append(node)


def reject_recursively(tree: Tree, laws: Laws, dice: Dice) -> Verdict:
    """Recursive rejection, dense and in float64: see `forerun.verifiers.recursive`."""
    node, kept = -1, list[int]()
    while True:
        p = laws[node].astype(np.float64)
        check_mass(p.sum(), len(kept))
        for child in tree.children(node):
            q, x = tree.proposal(child, len(p)), tree.tokens[child]
            assert q[x] > 0, ZERO_Q.format(child=child, token=x)
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
    return left / mass if mass > NO_MASS else p


ZERO_Q = "node {child} holds token {token}, whose q is 0: the drafter is wrong"


def check_mass(mass: float, depth: int) -> None:
    """Raises ConfigError if a law's sum shows that it is none (NaN, infinite or 0)."""
    if not 0 < mass < math.inf:
        raise ConfigError(
            f"the target's law after {depth} accepted draft tokens should sum to 1, but sums to "
            f"{mass}: its logits are not finite or no token is allowed; try dtype float32 or "
            "fewer constraints"
        )
