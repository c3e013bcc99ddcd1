"""What verifiers share."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import numpy as np

from forerun.dice import Dice
from forerun.errors import ConfigError
from forerun.records import Verdict
from forerun.sampling import argmax
from forerun.shaping import Laws
from forerun.tree import SWOR, Proposal, Tree

NO_MASS = 1e-12  # a residual below this share of its law is rounding error
STRICT = __debug__  # a draft that breaks its own law: an error, or under `python -O` a refusal
log = logging.getLogger("forerun")


def nowhere(node: int) -> bool:
    """The default of `waived`."""
    return False


def follow_argmax(tree: Tree, laws: Laws, waived: Callable[[int], bool] = nowhere) -> Verdict:
    """Descends while a child holds the argmax of its parent's shaped logits.

    waived: asked of the children where none does; the first that it says yes to is kept.
    """
    node, kept = -1, list[int]()
    while True:
        token = argmax(laws.logits(node))
        hits = np.flatnonzero((tree.parents == node) & (tree.tokens == token)).tolist()
        hits = hits or [child for child in tree.children(node) if waived(child)]
        if not hits:
            return Verdict(kept, token)
        node = hits[0]
        kept.append(node)


def reject_recursively(
    tree: Tree, laws: Laws, dice: Dice, waived: Callable[[int], bool] = nowhere
) -> Verdict:
    """Recursive rejection, dense and in float64: see `forerun.verifiers.recursive`.

    waived: asked of a node that lost its coin; where it says yes the node is kept all the same.
    """
    node, kept = -1, list[int]()
    while True:
        p = laws[node].astype(np.float64)
        check_mass(p.sum(), len(kept))
        for child in tree.children(node):
            if why := flaw(tree, child, len(p)):
                refuse(why)
                return Verdict(kept, dice.choice(p))
            q, x = tree.proposal(child, len(p)), tree.tokens[child]
            if dice.coin(min(1.0, p[x] / q[x])) or waived(child):
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


def flaw(tree: Tree, node: int, vocab: int) -> str | None:
    """Why the law that a node claims to come by cannot be one, given its siblings; or None."""
    token, q = int(tree.tokens[node]), tree.q(node)
    ids = tree.tokens[node : node + 1] if q is None else q.ids
    if len(outside := ids[(ids < 0) | (ids >= vocab)]):
        return f"the tree or its q holds token {outside[0]}, of {vocab} tokens"
    if q is None:
        return None
    mass = q.probs.sum()
    if not (0 < mass < math.inf and q.probs.min() >= 0):
        return (
            f"node {node} was drawn from a q that is no law, with sum {mass}: the drafter is wrong"
        )
    siblings = tree.children(int(tree.parents[node])) if tree.laws[node] == SWOR else ()
    is_taken = any(tree.tokens[s] == token for s in siblings if s < node)
    if is_taken or not prob_of(q, token) > 0:
        return f"node {node} holds token {token}, whose q is 0: the drafter is wrong"
    return None


def first_flaw(tree: Tree, nodes: Iterable[int], vocab: int) -> str | None:
    """The first flaw among several nodes, or None."""
    return next(filter(None, (flaw(tree, node, vocab) for node in nodes)), None)


def prob_of(q: Proposal, token: int) -> float:
    """q at one token, q's sum taken as 1."""
    return float(q.probs[q.ids == token].sum() / q.probs.sum())


class Refusals:
    """How many draft tokens were refused in this process because their law cannot be one."""

    count = 0


def refuse(why: str) -> None:
    """Raises, or under `python -O` counts and warns: the caller then draws from the target alone.

    The log has a line for the first refusal, the tenth, the hundredth and so on.
    """
    if STRICT:
        raise AssertionError(why)
    Refusals.count += 1
    if str(Refusals.count).strip("0") == "1":
        log.warning("refused a draft, drew from the target (%d so far): %s", Refusals.count, why)


def check_mass(mass: float, depth: int) -> None:
    """Raises ConfigError if a law's sum shows that it is none (NaN, infinite or 0)."""
    if not 0 < mass < math.inf:
        raise ConfigError(
            f"the target's law after {depth} accepted draft tokens should sum to 1, but sums to "
            f"{mass}: its logits are not finite or no token is allowed; try dtype float32 or "
            "fewer constraints"
        )
