"""Shared code of verifiers: reference rules, checks of drafts, and the base of compiled rules."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.core.dice import Dice, SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.sampling import argmax
from forerun.core.tree import IID, LAZY, SWOR, LazyProposal, Proposal, Tree, TreeBuilder
from forerun.errors import ConfigError, LawError
from forerun.utils.jit import kernel
from forerun.utils.renamed import renamed

ALL_LABELS = frozenset({"point", "iid", "swor", "lazy"})  # of rules that read q token by token
NO_MASS = 1e-12  # a residual with less mass than this share is rounding error
STRICT = __debug__  # invalid drafts raise; under `python -O` they are rejected with a warning
EMITTED = -1  # a kernel's result if no child was accepted
BLOCK = 256  # tokens summed at once by a kernel
CHANGED, TRIED, IN_Q = 1, 2, 4  # bits of a kernel's marks
log = logging.getLogger("forerun")
_warm: set[type] = set()  # verifiers with compiled kernels
if not TYPE_CHECKING:
    __getattr__ = renamed(
        __name__,
        Walk="KernelVerifier",
        Refusals="InvalidDrafts",
        refuse="reject_invalid",
        flaw="draft_error",
        first_flaw="first_draft_error",
        nowhere="never",
    )


def never(node: int) -> bool:
    """The default of `accept_anyway`."""
    return False


def follow_argmax(
    tree: Tree, laws: TargetProbs, accept_anyway: Callable[[int], bool] = never
) -> Verdict:
    """Descends while a child holds the argmax of its parent's shaped logits.

    accept_anyway: called for the children if none does; the first with True is kept.
    """
    node, kept = -1, list[int]()
    while True:
        token = argmax(laws.logits(node))
        hits = np.flatnonzero((tree.parents == node) & (tree.tokens == token)).tolist()
        hits = hits or [child for child in tree.children(node) if accept_anyway(child)]
        if not hits:
            return Verdict(kept, token)
        node = hits[0]
        kept.append(node)


def unchanged(p: float) -> float:
    """The default of `relax`."""
    return p


def reject_recursively(
    tree: Tree,
    laws: TargetProbs,
    dice: Dice,
    accept_anyway: Callable[[int], bool] = never,
    relax: Callable[[float], float] = unchanged,
) -> Verdict:
    """Recursive rejection, dense and in float64: see `forerun.verifiers.recursive`.

    accept_anyway: called for a node that the rule rejects; True keeps it.
    relax: replaces p(x) in the acceptance probability; exact only if it is the identity.
    """
    node, kept = -1, list[int]()
    while True:
        p = laws[node].astype(np.float64)
        check_mass(p.sum(), len(kept))
        children = tree.children(node)
        for child in children:
            if why := draft_error(tree, child, len(p)):
                reject_invalid(why)
                return Verdict(kept, dice.choice(p))
            x, is_last = tree.tokens[child], child == children[-1]
            lazy = tree.lazy[child] if tree.lazy and is_last else None
            q = tree.proposal(child, len(p)) if lazy is None else None
            q_x = q[x] if lazy is None else lazy.prob(int(x))  # type: ignore[index]
            if dice.coin(min(1.0, relax(p[x]) / q_x)) or accept_anyway(child):
                node = child
                kept.append(child)
                break
            if lazy is not None:
                return Verdict(kept, draw_residual(p, lazy, dice))
            p = residual(p, q)  # type: ignore[arg-type]
        else:
            return Verdict(kept, dice.choice(p))


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """norm[(p - q)+]; p itself if p = q up to rounding, where a rejection has probability 0."""
    left = np.maximum(p - q, 0.0)
    mass = left.sum()
    return left / mass if mass > NO_MASS else p


def draw_residual(p: np.ndarray, q: LazyProposal, dice: Dice) -> int:
    """A draw from norm[(p - q)+] by thinning, which needs q only of the tokens that p draws.

    A token x drawn from an envelope e >= (p - q)+, at first p, is kept with probability
    (p(x) - q(x))+ / e(x). Otherwise e(x) becomes (p(x) - q(x))+. Every kept token has the wanted
    distribution, whatever e is, and no q(x) is read twice.
    """
    envelope, least = p.copy(), NO_MASS * p.sum()
    while envelope.sum() > least:
        x = dice.choice(envelope)
        left = max(p[x] - q.prob(x), 0.0)
        if dice.coin(min(left / envelope[x], 1.0)):
            return x
        envelope[x] = left
    return dice.choice(p)  # p = q up to rounding, where a rejection has probability 0


def draft_error(tree: Tree, node: int, vocab: int) -> str | None:
    """What is wrong with the q that a node claims to be drawn from; None if it is valid."""
    token, q = int(tree.tokens[node]), tree.q(node)
    ids = tree.tokens[node : node + 1] if q is None else q.ids
    if len(outside := ids[(ids < 0) | (ids >= vocab)]):
        return f"the tree or its q holds token {outside[0]}, of {vocab} tokens"
    if tree.laws[node] == LAZY:
        lazy = tree.lazy[node]
        is_drawn = lazy is not None and lazy.prob(token) > 0
        return None if is_drawn else f"node {node} holds token {token} with q = 0: drafter bug"
    if q is None:
        return None
    mass = q.probs.sum()
    if not (0 < mass < math.inf and q.probs.min() >= 0):
        return f"node {node} was drawn from a q that is no distribution (sum {mass}): drafter bug"
    siblings = tree.children(int(tree.parents[node])) if tree.laws[node] == SWOR else ()
    is_taken = any(tree.tokens[s] == token for s in siblings if s < node)
    if is_taken or not prob_of(q, token) > 0:
        return f"node {node} holds token {token} with q = 0: drafter bug"
    return None


def first_draft_error(tree: Tree, nodes: Iterable[int], vocab: int) -> str | None:
    """The first error among several nodes, or None."""
    return next(filter(None, (draft_error(tree, node, vocab) for node in nodes)), None)


def prob_of(q: Proposal, token: int) -> float:
    """q at one token, normalised."""
    return float(q.probs[q.ids == token].sum() / q.probs.sum())


class InvalidDrafts:
    """How many draft tokens with an invalid q were rejected in this process."""

    count = 0


def reject_invalid(why: str) -> None:
    """Raises, or under `python -O` counts and warns; the caller then draws from the target.

    The first, tenth, hundredth and so on rejection is logged.
    """
    if STRICT:
        raise AssertionError(why)
    InvalidDrafts.count += 1
    if str(InvalidDrafts.count).strip("0") == "1":
        log.warning(
            "invalid draft, drew from the target instead (%d so far): %s", InvalidDrafts.count, why
        )


def check_mass(mass: float, depth: int) -> None:
    """Raises LawError if a distribution sums to NaN or infinity, ConfigError if it sums to 0."""
    if not 0 < mass < math.inf:
        raise (ConfigError if mass == 0 else LawError)(
            f"the target's distribution after {depth} accepted draft tokens should sum to 1, but "
            f"sums to {mass}: its logits are not finite or no token is allowed; try dtype float32 "
            "or fewer constraints"
        )


class KernelVerifier(Verifier):
    """Walks down from the root with one kernel call per visited node. Not thread-safe."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[np.ndarray, ...]] = {}  # by vocabulary size

    @abstractmethod
    def judge_node(self, p: np.ndarray, *more: Any) -> tuple[int, int, int, float, int]:
        """The kernel: one step of the walk from a node with target distribution p [V].

        The mass of p is taken as 1 (a float32 row is within 1e-7 of it). more: the node, uniforms,
        number used, `arrays` of the tree, `new_buffers`. Returns (accepted child, its token) or
        (EMITTED, token); the number of uniforms used; a mass that is not finite and positive if p
        is invalid; the first child with an invalid q (see `draft_error`; -1: none), which ends the
        trials.
        """

    @abstractmethod
    def verify_reference(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        """The rule, dense and in float64; the oracle in tests."""

    @staticmethod
    @abstractmethod
    def new_buffers(vocab: int) -> tuple[np.ndarray, ...]:
        """Working memory of the kernel for rows of `vocab` tokens."""

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        if laws.sampling.is_greedy:
            return follow_argmax(tree, laws)
        if tree.lazy or not isinstance(dice, SeededDice):
            return self.verify_reference(tree, laws, dice)
        flat, uniforms = arrays(tree), dice.peek(2 * len(tree) + 1)
        node, used, kept = -1, 0, list[int]()
        while True:
            p = np.ascontiguousarray(laws[node])
            buffers = self._buffers_for(len(p))
            step = self.judge_node(p, node, uniforms, used, *flat, *buffers)
            child, token, used, mass, bad = step
            if bad >= 0:
                reject_invalid(draft_error(tree, bad, len(p)) or f"node {bad} does not fit its q")
            check_mass(mass, len(kept))
            if child == EMITTED:
                dice.skip(used)
                return Verdict(kept, token)
            node = child
            kept.append(child)

    def warm_up(self) -> None:
        """Compiles the kernel for both float types or loads it from the cache, once per process."""
        if type(self) in _warm:
            return
        builder = TreeBuilder()
        builder.add(0, -1, IID, Proposal(np.array([0], np.int32), np.ones(1)))
        flat, uniforms = arrays(builder.build()), np.full(2, 0.75)
        for dtype in (np.float32, np.float64):
            self.judge_node(np.full(2, 0.5, dtype), -1, uniforms, 0, *flat, *self.new_buffers(2))
        _warm.add(type(self))

    def _buffers_for(self, vocab: int) -> tuple[np.ndarray, ...]:
        if vocab not in self._buffers:
            self._buffers[vocab] = self.new_buffers(vocab)
        return self._buffers[vocab]


def arrays(tree: Tree) -> tuple[np.ndarray, ...]:
    """The arrays of a tree in the order that kernels take them."""
    return (tree.tokens, tree.parents, tree.laws, tree.rows, tree.starts, tree.q_ids, tree.q_probs)


@kernel
def conditional(
    ids: np.ndarray, probs: np.ndarray, x: int, is_swor: bool, marks: np.ndarray
) -> tuple[float, float]:
    """q(x) and the mass of q; draws without replacement exclude the tokens marked TRIED.

    (0, NaN) for an invalid id and for a probability that is NaN or negative.
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


@kernel(fastmath={"reassoc", "nsz", "contract"})
def mass_of(weights: np.ndarray) -> float:
    """The sum of weights in float64."""
    total = 0.0
    for i in range(len(weights)):
        total += np.float64(weights[i])
    return total
