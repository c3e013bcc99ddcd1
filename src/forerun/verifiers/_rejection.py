"""Recursive rejection, compiled: one visited node (`judge`) or a walk from the root (`walk`).

A rejection changes p only on q's support, some ten of V tokens for a drafter that looks n-grams up.
So the residual is kept unnormalised: p itself, the changed weights, and the mass of both. Only the
final draw reads the whole row. `base.reject_recursively` is the plain form.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from forerun.core.tree import POINT, SWOR
from forerun.utils.jit import bare
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

CANCELLED = 1 / 16  # below this share of the mass before, a difference is summed from all weights


class Scratch(NamedTuple):
    """Working memory for one vocabulary, all in one array; `marks` is all 0 between calls."""

    unit: np.ndarray  # float64 [1], the mass of a chosen token
    weights: np.ndarray  # float64 [V], the residual where marked CHANGED
    sums: np.ndarray  # float64 [V / BLOCK], masses of blocks
    marks: np.ndarray  # uint8 [V]
    marked: np.ndarray  # int32 [V], which tokens have a mark
    bits: np.ndarray  # int32 [V], of a softmax


@bare
def places(vocab: int) -> tuple[int, int, int, int, int, int]:
    """Where the arrays of a `Scratch` end in one of float64."""
    weights = 1 + vocab
    sums = weights + (vocab + BLOCK - 1) // BLOCK
    marks = sums + vocab // 8 + 1
    marked = marks + vocab // 2 + 1
    return 1, weights, sums, marks, marked, marked + vocab // 2 + 1


@bare
def scratch(room: np.ndarray, vocab: int) -> Scratch:
    """The arrays that lie in `room`: a kernel is told of one in a fraction of the time."""
    unit, weights, sums, marks, marked, bits = places(vocab)
    return Scratch(
        room[:unit],
        room[unit:weights],
        room[weights:sums],
        room[sums:marks].view(np.uint8)[:vocab],
        room[marks:marked].view(np.int32)[:vocab],
        room[marked:bits].view(np.int32)[:vocab],
    )


@bare
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
    room: np.ndarray,
) -> tuple[int, int, int, float]:
    """All of `judge` from the root down, over the softmax of inverse * logits [n + 1, V].

    Fills `kept` with the accepted nodes, and `probs` with the laws at the root and at these.
    Returns how many there are, the token behind them, the uniforms used, and a mass that is NaN
    where anything is broken: nothing then counts.
    """
    own, node, count, used = scratch(room, logits.shape[1]), -1, 0, 0
    while softmax_into(logits[node + 1], inverse, probs[count], own.bits):
        child, token, used, mass, bad = descend(
            probs[count],
            node,
            uniforms,
            used,
            tokens,
            parents,
            laws,
            rows,
            starts,
            q_ids,
            q_probs,
            own,
        )
        if bad >= 0 or not 0.0 < mass < math.inf:
            break
        if child == EMITTED:
            return count, token, used, mass
        kept[count] = node = child
        count += 1
    return 0, 0, 0, math.nan


@bare
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
    room: np.ndarray,
) -> tuple[int, int, int, float, int]:
    """Tries the children of `node` in the order drawn against its law p [V]: see `Walk`."""
    return descend(
        p,
        node,
        uniforms,
        used,
        tokens,
        parents,
        laws,
        rows,
        starts,
        q_ids,
        q_probs,
        scratch(room, len(p)),
    )


@bare
def descend(
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
    room: Scratch,
) -> tuple[int, int, int, float, int]:
    """`judge`, its room named."""
    outcome, token, mass, num_marked, bad = EMITTED, 0, 1.0, 0, -1
    for child in range(node + 1, len(tokens)):
        if parents[child] != node:
            continue
        x, is_swor = tokens[child], laws[child] == SWOR
        ids, probs = tokens[child : child + 1], room.unit
        if laws[child] != POINT:
            part = slice(starts[rows[child]], starts[rows[child] + 1])
            ids, probs = q_ids[part], q_probs[part]
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
        token, mass = pick(p, room, uniforms[used], num_marked)
        used += 1
    for i in range(num_marked):
        room.marks[room.marked[i]] = 0
    return outcome, token, used, mass, bad


@bare
def weight_of(p: np.ndarray, room: Scratch, token: int) -> float:
    """The unnormalised residual at one token."""
    weight, changed = np.float64(p[token]), room.weights[token]  # loads first: see block_mass
    return changed if room.marks[token] & CHANGED else weight


@bare
def mark(room: Scratch, token: int, bit: int, num_marked: int) -> int:
    """Sets a mark; returns how many tokens have one."""
    if room.marks[token] == 0:
        room.marked[num_marked] = token
        num_marked += 1
    room.marks[token] |= bit
    return num_marked


@bare
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


@bare
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


@bare
def pick(p: np.ndarray, room: Scratch, uniform: float, num_marked: int) -> tuple[int, float]:
    """The token where the running sum of the weights passes uniform x mass, and the mass."""
    total, is_many = 0.0, num_marked > len(room.sums)
    for block in range(len(room.sums)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        if is_many:
            room.sums[block] = block_mass(p[part], room.weights[part], room.marks[part])
        else:
            room.sums[block] = mass_of(p[part])
    for i in range(0 if is_many else num_marked):  # p alone is a third of what blocks read else
        block = room.marked[i] // BLOCK
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        room.sums[block] = block_mass(p[part], room.weights[part], room.marks[part])
    for block in range(len(room.sums)):
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


@bare(fastmath={"reassoc", "nsz", "contract"})
def block_mass(p: np.ndarray, weights: np.ndarray, marks: np.ndarray) -> float:
    """The sum of the weights of a block of tokens, those marked IN_Q left out."""
    total = 0.0
    for i in range(len(p)):  # loads first, selects after: that is what vectorises
        weight, changed, bits = np.float64(p[i]), weights[i], marks[i]
        weight = changed if bits & CHANGED else weight
        total += 0.0 if bits & IN_Q else weight
    return total
