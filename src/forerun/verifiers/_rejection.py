"""Recursive rejection, compiled: one visited node (`judge_node`) or a whole tree (`walk`).

A rejection changes p only on the support of q, about ten of V tokens for an n-gram drafter. So the
residual is stored unnormalised: p itself, the changed weights, and their mass. Only the final draw
reads the whole row. `base.reject_recursively` is the reference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.core.tree import POINT, SWOR
from forerun.utils.jit import kernel
from forerun.verifiers._softmax import softmax_into
from forerun.verifiers.base import (
    BLOCK,
    CHANGED,
    EMITTED,
    IN_Q,
    NO_MASS,
    TRIED,
    conditional,
    mass_of,
)

MIN_MASS_SHARE = 1 / 16  # a residual below this share of the mass is summed again, not subtracted


class TreeArrays(NamedTuple):
    """The arrays of a `Tree` inside compiled code, in the order of `base.arrays`.

    Kernels that Python calls take them one by one: converting a tuple takes longer.
    """

    tokens: np.ndarray
    parents: np.ndarray
    laws: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    q_ids: np.ndarray
    q_probs: np.ndarray


class Scratch(NamedTuple):
    """Working memory for one vocabulary, all in one array; `marks` is all 0 between calls."""

    unit: np.ndarray  # float64 [1], the mass of a chosen token
    weights: np.ndarray  # float64 [V], the residual of tokens marked CHANGED
    sums: np.ndarray  # float64 [V / BLOCK], masses of blocks
    marks: np.ndarray  # uint8 [V]
    marked: np.ndarray  # int32 [V], tokens with a mark
    bits: np.ndarray  # int32 [V], for the softmax


@kernel
def scratch_ends(vocab: int) -> tuple[int, int, int, int, int, int]:
    """Ends of the arrays of a `Scratch` in one float64 array."""
    weights = 1 + vocab
    sums = weights + (vocab + BLOCK - 1) // BLOCK
    marks = sums + vocab // 8 + 1
    marked = marks + vocab // 2 + 1
    return 1, weights, sums, marks, marked, marked + vocab // 2 + 1


@kernel
def split_scratch(buffer: np.ndarray, vocab: int) -> Scratch:
    """The arrays of a `Scratch` as views of one buffer: one kernel argument instead of six."""
    unit, weights, sums, marks, marked, bits = scratch_ends(vocab)
    return Scratch(
        buffer[:unit],
        buffer[unit:weights],
        buffer[weights:sums],
        buffer[sums:marks].view(np.uint8)[:vocab],
        buffer[marks:marked].view(np.int32)[:vocab],
        buffer[marked:bits].view(np.int32)[:vocab],
    )


@kernel
def walk(
    logits: np.ndarray,
    inverse: float,
    probs: np.ndarray,
    kept: np.ndarray,
    uniforms: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    laws: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    q_ids: np.ndarray,
    q_probs: np.ndarray,
    buffer: np.ndarray,
) -> tuple[int, int, int, float]:
    """Repeats `judge_node` from the root down, on the softmax of inverse * logits [n + 1, V].

    Fills `kept` with the accepted nodes, and `probs` with the distributions at the root and at
    these nodes. Returns their number, the token after them, the number of uniforms used, and the
    mass, which is NaN if p or q is invalid; the other results are then meaningless.
    """
    tree = TreeArrays(tokens, parents, laws, rows, starts, q_ids, q_probs)
    scratch, node, count, used = split_scratch(buffer, logits.shape[1]), -1, 0, 0
    while softmax_into(logits[node + 1], inverse, probs[count], scratch.bits):
        step = descend(probs[count], node, uniforms, used, tree, scratch)
        child, token, used, mass, bad = step
        if bad >= 0 or not 0.0 < mass < math.inf:
            break
        if child == EMITTED:
            return count, token, used, mass
        kept[count] = node = child
        count += 1
    return 0, 0, 0, math.nan


@kernel
def judge_node(
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
    buffer: np.ndarray,
) -> tuple[int, int, int, float, int]:
    """Tries the children of `node` in the order drawn against p [V]: see `KernelVerifier`."""
    tree = TreeArrays(tokens, parents, laws, rows, starts, q_ids, q_probs)
    return descend(p, node, uniforms, used, tree, split_scratch(buffer, len(p)))


@kernel
def descend(
    p: np.ndarray,
    node: int,
    uniforms: np.ndarray,
    used: int,
    tree: TreeArrays,
    scratch: Scratch,
) -> tuple[int, int, int, float, int]:
    """`judge_node` with its arguments joined to records."""
    outcome, token, mass, num_marked, bad = EMITTED, 0, 1.0, 0, -1
    for child in range(node + 1, len(tree.tokens)):
        if tree.parents[child] != node:
            continue
        x, is_swor = tree.tokens[child], tree.laws[child] == SWOR
        ids, probs = tree.tokens[child : child + 1], scratch.unit
        if tree.laws[child] != POINT:
            row = tree.rows[child]
            part = slice(tree.starts[row], tree.starts[row + 1])
            ids, probs = tree.q_ids[part], tree.q_probs[part]
        q_x, total = conditional(ids, probs, x, is_swor, scratch.marks)
        if not (q_x > 0.0 and total < math.inf):
            bad = child
            break
        scale = mass / total
        weight = weight_of(p, scratch, x)
        used += 1
        if weight >= scale * q_x or uniforms[used - 1] * scale * q_x < weight:
            outcome, token, mass = child, x, weight
            break
        left = remaining(p, ids, probs, scale, mass, is_swor, scratch)
        if not left <= NO_MASS * mass:  # else p = q: rejection has probability 0
            num_marked = subtract(p, ids, probs, scale, is_swor, scratch, num_marked)
            mass = left
        num_marked = mark(scratch, x, TRIED, num_marked)
    if outcome == EMITTED:
        token, mass = pick(p, scratch, uniforms[used], num_marked)
        used += 1
    for i in range(num_marked):
        scratch.marks[scratch.marked[i]] = 0
    return outcome, token, used, mass, bad


@kernel
def weight_of(p: np.ndarray, scratch: Scratch, token: int) -> float:
    """The unnormalised residual at one token."""
    weight, changed = np.float64(p[token]), scratch.weights[token]  # loads first: see block_mass
    return changed if scratch.marks[token] & CHANGED else weight


@kernel
def mark(scratch: Scratch, token: int, bit: int, num_marked: int) -> int:
    """Sets a mark; returns the number of marked tokens."""
    if scratch.marks[token] == 0:
        scratch.marked[num_marked] = token
        num_marked += 1
    scratch.marks[token] |= bit
    return num_marked


@kernel
def remaining(
    p: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
    scale: float,
    mass: float,
    is_swor: bool,
    scratch: Scratch,
) -> float:
    """The mass of (p - scale q)+, by subtraction, or by a full sum if that would cancel."""
    removed = kept = 0.0
    for i in range(len(ids)):
        if not (is_swor and scratch.marks[ids[i]] & TRIED):
            weight = weight_of(p, scratch, ids[i])
            removed += min(weight, scale * probs[i])
            kept += max(weight - scale * probs[i], 0.0)
    if not mass - removed < MIN_MASS_SHARE * mass:
        return mass - removed
    for i in range(len(ids)):
        if not (is_swor and scratch.marks[ids[i]] & TRIED):
            scratch.marks[ids[i]] |= IN_Q
    kept += block_mass(p, scratch.weights, scratch.marks)
    for i in range(len(ids)):
        scratch.marks[ids[i]] &= CHANGED | TRIED
    return kept


@kernel
def subtract(
    p: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
    scale: float,
    is_swor: bool,
    scratch: Scratch,
    num_marked: int,
) -> int:
    """Replaces the weights on q's support by (p - scale q)+; returns the new `num_marked`."""
    for i in range(len(ids)):
        if not (is_swor and scratch.marks[ids[i]] & TRIED):
            left = max(weight_of(p, scratch, ids[i]) - scale * probs[i], 0.0)
            num_marked = mark(scratch, ids[i], CHANGED, num_marked)
            scratch.weights[ids[i]] = left
    return num_marked


@kernel
def pick(p: np.ndarray, scratch: Scratch, uniform: float, num_marked: int) -> tuple[int, float]:
    """The token where the running sum of the weights passes uniform x mass, and the mass."""
    total, is_many = 0.0, num_marked > len(scratch.sums)
    for block in range(len(scratch.sums)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        if is_many:
            scratch.sums[block] = block_mass(p[part], scratch.weights[part], scratch.marks[part])
        else:
            scratch.sums[block] = mass_of(p[part])
    for i in range(0 if is_many else num_marked):  # only these blocks read weights and marks
        block = scratch.marked[i] // BLOCK
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        scratch.sums[block] = block_mass(p[part], scratch.weights[part], scratch.marks[part])
    for block in range(len(scratch.sums)):
        total += scratch.sums[block]
    if not 0.0 < total < math.inf:
        return 0, total
    below, target, last = 0.0, uniform * total, 0
    for block in range(len(scratch.sums)):
        if below + scratch.sums[block] > target:
            for token in range(block * BLOCK, min((block + 1) * BLOCK, len(p))):
                weight = weight_of(p, scratch, token)
                below += weight
                if weight > 0.0:
                    last = token
                    if below > target:
                        return token, total
        else:
            below += scratch.sums[block]
    return last, total


@kernel(fastmath={"reassoc", "nsz", "contract"})
def block_mass(p: np.ndarray, weights: np.ndarray, marks: np.ndarray) -> float:
    """The sum of the weights of a block of tokens except those marked IN_Q."""
    total = 0.0
    for i in range(len(p)):  # all loads before the selects, so that it vectorises
        weight, changed, bits = np.float64(p[i]), weights[i], marks[i]
        weight = changed if bits & CHANGED else weight
        total += 0.0 if bits & IN_Q else weight
    return total
