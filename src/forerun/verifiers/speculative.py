"""The default verifier: recursive rejection that touches only what a proposal touches.

The law and, for the same uniforms, the outcome of `recursive` (Miao et al., "SpecInfer", 2023; Jeon
et al., "Recursive Speculative Decoding", 2024). A rejection changes p only on q's support, some ten
of V tokens for a drafter that looks n-grams up, so the residual is kept unnormalised: p itself, the
changed weights, and the mass of both. Only the final draw reads the whole row. Lossless.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from forerun.dice import Dice, SeededDice
from forerun.records import Verdict
from forerun.roles import Verifier
from forerun.shaping import Laws
from forerun.tree import IID, POINT, SWOR, Proposal, Tree, TreeBuilder
from forerun.verifiers.base import (
    NO_MASS,
    check_mass,
    flaw,
    follow_argmax,
    refuse,
    reject_recursively,
)

CHANGED, TRIED, IN_Q = 1, 2, 4  # bits of Scratch.marks
EMITTED = -1  # instead of an accepted child
BLOCK = 256
CANCELLED = 1 / 16  # below this share of the mass before, a difference is summed anew


class Scratch(NamedTuple):
    """Working memory for one vocabulary; `marks` is all 0 between calls."""

    weights: np.ndarray  # float64 [V], the residual where marked CHANGED
    marks: np.ndarray  # uint8 [V]
    marked: np.ndarray  # int32 [V], which tokens have a mark
    sums: np.ndarray  # float64 [V / BLOCK], masses of blocks


class Speculative(Verifier):
    """One kernel call per visited node. One instance serves one thread."""

    def __init__(self) -> None:
        self._scratch: dict[int, Scratch] = {}

    def warm_up(self) -> None:
        warm_up()

    def verify(self, tree: Tree, laws: Laws, dice: Dice) -> Verdict:
        if laws.sampling.is_greedy:
            return follow_argmax(tree, laws)
        if not isinstance(dice, SeededDice):
            return reject_recursively(tree, laws, dice)
        flat = arrays(tree)
        uniforms = dice.peek(len(tree) + 1)
        node, used, kept = -1, 0, list[int]()
        while True:
            p = np.ascontiguousarray(laws[node])
            room = self._room(len(p))
            child, token, used, mass, bad = judge(p, node, uniforms, used, *flat, *room)
            if bad >= 0:
                refuse(flaw(tree, bad, len(p)) or f"node {bad} and its q do not fit")
            check_mass(mass, len(kept))
            if child == EMITTED:
                dice.skip(used)
                return Verdict(kept, token)
            node = child
            kept.append(child)

    def _room(self, vocab: int) -> tuple[np.ndarray, ...]:
        if vocab not in self._scratch:
            self._scratch[vocab] = new_scratch(vocab)
        return self._scratch[vocab]


def arrays(tree: Tree) -> tuple[np.ndarray, ...]:
    """The tree as the kernel takes it."""
    return (tree.tokens, tree.parents, tree.laws, tree.rows, tree.starts, tree.q_ids, tree.q_probs)


def new_scratch(vocab: int) -> Scratch:
    """Working memory for rows of `vocab` tokens."""
    return Scratch(
        np.zeros(vocab),
        np.zeros(vocab, np.uint8),
        np.zeros(vocab, np.int32),
        np.zeros((vocab + BLOCK - 1) // BLOCK),
    )


@njit(cache=True, nogil=True)
def judge(
    p: np.ndarray,
    node: int,
    uniforms: np.ndarray,
    used: int,
    tokens: np.ndarray,
    parents: np.ndarray,
    laws: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    q_ids: np.ndarray,
    q_probs: np.ndarray,
    weights: np.ndarray,
    marks: np.ndarray,
    marked: np.ndarray,
    sums: np.ndarray,
) -> tuple[int, int, int, float, int]:
    """Tries the children of `node` in the order drawn against its law p [V].

    The mass of p is taken to be 1: a float32 row is within 1e-7 of it.
    Returns (accepted child, its token) or (EMITTED, token); then the number of uniforms used so
    far, a mass that shows a broken law, and the first child whose q cannot be one (see
    `verifiers.base.flaw`; -1 if there is none), which ends the trials.
    """
    room = Scratch(weights, marks, marked, sums)
    outcome, token, mass, num_marked, bad = EMITTED, 0, 1.0, 0, -1
    unit = np.ones(1)
    for child in range(node + 1, len(tokens)):
        if parents[child] != node:
            continue
        x, is_swor = tokens[child], laws[child] == SWOR
        ids, probs = tokens[child : child + 1], unit
        if laws[child] != POINT:
            part = slice(starts[rows[child]], starts[rows[child] + 1])
            ids, probs = q_ids[part], q_probs[part]
        if outside(ids, len(p)) >= 0:
            bad = child
            break
        q_x, total = conditional(ids, probs, x, is_swor, room.marks)
        if not (q_x > 0.0 and total < math.inf):
            bad = child
            break
        scale = mass / total
        weight = weight_of(p, room, x)
        used += 1
        if weight >= scale * q_x or uniforms[used - 1] * scale * q_x < weight:
            outcome, token, mass = child, x, weight
            break
        left = remaining(p, ids, probs, scale, mass, is_swor, room)
        if not left <= NO_MASS * mass:  # else p = q: that rejection had no chance
            num_marked = subtract(p, ids, probs, scale, is_swor, room, num_marked)
            mass = left
        num_marked = mark(room, x, TRIED, num_marked)
    if outcome == EMITTED:
        token, mass = pick(p, room, uniforms[used], num_marked > 0)
        used += 1
    for i in range(num_marked):
        room.marks[room.marked[i]] = 0
    return outcome, token, used, mass, bad


@njit(cache=True, nogil=True)
def outside(ids: np.ndarray, vocab: int) -> int:
    """The first index of an id that is no token; -1 if there is none."""
    for i in range(len(ids)):
        if not 0 <= ids[i] < vocab:
            return i
    return -1


@njit(cache=True, nogil=True)
def conditional(
    ids: np.ndarray, probs: np.ndarray, x: int, is_swor: bool, marks: np.ndarray
) -> tuple[float, float]:
    """q(x) and the mass of q; draws without replacement leave out the tokens already tried.

    The mass is NaN if a probability is NaN or negative.
    """
    q_x = total = 0.0
    for i in range(len(ids)):
        if not probs[i] >= 0.0:
            return 0.0, math.nan
        if not (is_swor and marks[ids[i]] & TRIED):
            total += probs[i]
            if ids[i] == x:
                q_x = probs[i]
    return q_x, total


@njit(cache=True, nogil=True)
def weight_of(p: np.ndarray, room: Scratch, token: int) -> float:
    """The unnormalised residual at one token."""
    weight, changed = np.float64(p[token]), room.weights[token]  # loads first: see block_mass
    return changed if room.marks[token] & CHANGED else weight


@njit(cache=True, nogil=True)
def mark(room: Scratch, token: int, bit: int, num_marked: int) -> int:
    """Sets a mark; returns how many tokens have one."""
    if room.marks[token] == 0:
        room.marked[num_marked] = token
        num_marked += 1
    room.marks[token] |= bit
    return num_marked


@njit(cache=True, nogil=True)
def remaining(
    p: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
    scale: float,
    mass: float,
    is_swor: bool,
    room: Scratch,
) -> float:
    """The mass of (p - scale q)+: by subtraction, or by a full sum where that would cancel."""
    removed = kept = 0.0
    for i in range(len(ids)):
        if not (is_swor and room.marks[ids[i]] & TRIED):
            weight = weight_of(p, room, ids[i])
            removed += min(weight, scale * probs[i])
            kept += max(weight - scale * probs[i], 0.0)
    if not mass - removed < CANCELLED * mass:
        return mass - removed
    for i in range(len(ids)):
        if not (is_swor and room.marks[ids[i]] & TRIED):
            room.marks[ids[i]] |= IN_Q
    kept += block_mass(p, room.weights, room.marks)
    for i in range(len(ids)):
        room.marks[ids[i]] &= CHANGED | TRIED
    return kept


@njit(cache=True, nogil=True)
def subtract(
    p: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
    scale: float,
    is_swor: bool,
    room: Scratch,
    num_marked: int,
) -> int:
    """Replaces the weights on q's support by (p - scale q)+; returns how many tokens are marked."""
    for i in range(len(ids)):
        if not (is_swor and room.marks[ids[i]] & TRIED):
            left = max(weight_of(p, room, ids[i]) - scale * probs[i], 0.0)
            num_marked = mark(room, ids[i], CHANGED, num_marked)
            room.weights[ids[i]] = left
    return num_marked


@njit(cache=True, nogil=True)
def pick(p: np.ndarray, room: Scratch, uniform: float, is_changed: bool) -> tuple[int, float]:
    """The token where the running sum of the weights passes uniform x mass, and the mass."""
    total = 0.0
    for block in range(len(room.sums)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        if is_changed:
            room.sums[block] = block_mass(p[part], room.weights[part], room.marks[part])
        else:
            room.sums[block] = plain_mass(p[part])
        total += room.sums[block]
    if not 0.0 < total < math.inf:
        return 0, total
    below, target, last = 0.0, uniform * total, 0
    for block in range(len(room.sums)):
        if below + room.sums[block] > target:
            for token in range(block * BLOCK, min((block + 1) * BLOCK, len(p))):
                weight = weight_of(p, room, token)
                below += weight
                if weight > 0.0:
                    last = token
                    if below > target:
                        return token, total
        else:
            below += room.sums[block]
    return last, total


@njit(cache=True, nogil=True, fastmath={"reassoc", "nsz", "contract"})
def block_mass(p: np.ndarray, weights: np.ndarray, marks: np.ndarray) -> float:
    """The sum of the weights of a block of tokens, those marked IN_Q left out."""
    total = 0.0
    for i in range(len(p)):  # loads first, selects after: that is what vectorises
        weight, changed, bits = np.float64(p[i]), weights[i], marks[i]
        weight = changed if bits & CHANGED else weight
        total += 0.0 if bits & IN_Q else weight
    return total


@njit(cache=True, nogil=True, fastmath={"reassoc", "nsz", "contract"})
def plain_mass(p: np.ndarray) -> float:
    """The sum of p over a block of tokens."""
    total = 0.0
    for i in range(len(p)):
        total += np.float64(p[i])
    return total


def warm_up() -> None:
    """Compiles the kernels for both float types, or loads them from the cache."""
    scratch: tuple[np.ndarray, ...] = new_scratch(2)
    builder = TreeBuilder()
    builder.add(0, -1, IID, Proposal(np.array([0], np.int32), np.ones(1)))
    tree, uniforms = builder.build(), np.full(2, 0.75)
    for dtype in (np.float32, np.float64):
        judge(np.full(2, 0.5, dtype), -1, uniforms, 0, *arrays(tree), *scratch)
