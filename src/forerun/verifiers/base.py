"""What verifiers share."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from forerun.core.dice import Dice, SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.sampling import argmax
from forerun.core.tree import IID, SWOR, Proposal, Tree, TreeBuilder
from forerun.errors import ConfigError, LawError
from forerun.utils.jit import bare

NO_MASS = 1e-12  # a residual below this share of its law is rounding error
STRICT = __debug__  # a draft that breaks its own law: an error, or under `python -O` a refusal
EMITTED = -1  # what a kernel tells instead of an accepted child
BLOCK = 256  # tokens that a kernel sums at once
CHANGED, TRIED, IN_Q = 1, 2, 4  # bits of a kernel's marks
log = logging.getLogger("forerun")
_warm: set[type] = set()  # rules whose kernels are compiled


def nowhere(node: int) -> bool:
    """The default of `waived`."""
    return False


def follow_argmax(
    tree: Tree, laws: TargetProbs, waived: Callable[[int], bool] = nowhere
) -> Verdict:
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
    tree: Tree, laws: TargetProbs, dice: Dice, waived: Callable[[int], bool] = nowhere
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
    """Raises LawError if a law's sum shows that it is none (NaN or infinite), ConfigError for 0."""
    if not 0 < mass < math.inf:
        raise (ConfigError if mass == 0 else LawError)(
            f"the target's law after {depth} accepted draft tokens should sum to 1, but sums to "
            f"{mass}: its logits are not finite or no token is allowed; try dtype float32 or "
            "fewer constraints"
        )


class Walk(Verifier):
    """Down from the root, one kernel call per visited node. One instance serves one thread."""

    def __init__(self) -> None:
        self._rooms: dict[int, tuple[np.ndarray, ...]] = {}

    @abstractmethod
    def judge(self, p: np.ndarray, *more: Any) -> tuple[int, int, int, float, int]:
        """The kernel: where the walk goes from a node whose law is p [V], with p's mass taken as 1
        (a float32 row is within 1e-7 of it).

        more: the node, uniforms, how many are used, `arrays` of the tree, `new_room`. Returns
        (accepted child, its token) or (EMITTED, token); the number of uniforms used so far; a mass
        that shows a broken law; the first child whose q cannot be one (see `flaw`; -1: none), which
        ends the trials.
        """

    @abstractmethod
    def plainly(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        """The rule, dense and in float64: what tests enumerate."""

    @staticmethod
    @abstractmethod
    def new_room(vocab: int) -> tuple[np.ndarray, ...]:
        """Working memory of the kernel for rows of `vocab` tokens."""

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        if laws.sampling.is_greedy:
            return follow_argmax(tree, laws)
        if not isinstance(dice, SeededDice):
            return self.plainly(tree, laws, dice)
        flat, uniforms = arrays(tree), dice.peek(2 * len(tree) + 1)
        node, used, kept = -1, 0, list[int]()
        while True:
            p = np.ascontiguousarray(laws[node])
            room = self._room(len(p))
            child, token, used, mass, bad = self.judge(p, node, uniforms, used, *flat, *room)
            if bad >= 0:
                refuse(flaw(tree, bad, len(p)) or f"node {bad} and its q do not fit")
            check_mass(mass, len(kept))
            if child == EMITTED:
                dice.skip(used)
                return Verdict(kept, token)
            node = child
            kept.append(child)

    def warm_up(self) -> None:
        """Compiles the kernel for both float types, or loads it from the cache; once a process."""
        if type(self) in _warm:
            return
        builder = TreeBuilder()
        builder.add(0, -1, IID, Proposal(np.array([0], np.int32), np.ones(1)))
        flat, uniforms = arrays(builder.build()), np.full(2, 0.75)
        for dtype in (np.float32, np.float64):
            self.judge(np.full(2, 0.5, dtype), -1, uniforms, 0, *flat, *self.new_room(2))
        _warm.add(type(self))

    def _room(self, vocab: int) -> tuple[np.ndarray, ...]:
        if vocab not in self._rooms:
            self._rooms[vocab] = self.new_room(vocab)
        return self._rooms[vocab]


def arrays(tree: Tree) -> tuple[np.ndarray, ...]:
    """The tree as kernels take it."""
    return (tree.tokens, tree.parents, tree.laws, tree.rows, tree.starts, tree.q_ids, tree.q_probs)


@bare
def conditional(
    ids: np.ndarray, probs: np.ndarray, x: int, is_swor: bool, marks: np.ndarray
) -> tuple[float, float]:
    """q(x) and the mass of q; draws without replacement leave out the tokens marked TRIED.

    (0, NaN) for an id that is no token and for a probability that is NaN or negative.
    """
    q_x = total = 0.0
    for i in range(len(ids)):
        if not (0 <= ids[i] < len(marks) and probs[i] >= 0.0):
            return 0.0, math.nan
        if not (is_swor and marks[ids[i]] & TRIED):
            total += probs[i]
            if ids[i] == x:
                q_x = probs[i]
    return q_x, total


@bare(fastmath={"reassoc", "nsz", "contract"})
def mass_of(weights: np.ndarray) -> float:
    """The sum of some weights in float64."""
    total = 0.0
    for i in range(len(weights)):
        total += np.float64(weights[i])
    return total
