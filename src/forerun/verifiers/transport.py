"""Drawn children first, chosen ones last: optimal for one drawn child among chosen ones.

Hu et al., "Towards Optimal Multi-draft Speculative Decoding", 2025. Accept a drawn child x with
probability min(1, r(x) / q(x)), r = p at first; a rejection makes r norm[(r - q)+]. Then draw
y ~ r: if a chosen child holds y go on there, else emit y. As r is what is still owed, the emitted
token has law p. Chosen tokens E and one draw from a q without E are accepted with probability
p(E) + sum min(p, q): that is all that a transport from drafts to tokens can reach. Tried in the
order in which they stand, chosen tokens before the draw, they get p(E) + sum min(p, (1 - p(E)) q).

Judges every tree. On chains and where nothing is chosen it is recursive rejection; where all is
chosen, it accepts as often. Lossless.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.tree import POINT, SWOR, Tree
from forerun.verifiers.base import (
    BLOCK,
    EMITTED,
    NO_MASS,
    TRIED,
    Walk,
    check_mass,
    conditional,
    flaw,
    mass_of,
    refuse,
    residual,
)


class Transport(Walk):
    """One kernel call per visited node. One instance serves one thread."""

    def judge(self, p: np.ndarray, *more: Any) -> tuple[int, int, int, float, int]:
        return judge(p, *more)

    def plainly(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        node, kept = -1, list[int]()
        while True:
            p, chosen = laws[node].astype(np.float64), dict[int, int]()
            check_mass(p.sum(), len(kept))
            for child in tree.children(node):
                if why := flaw(tree, child, len(p)):
                    refuse(why)
                    return Verdict(kept, dice.choice(p))
                x = int(tree.tokens[child])
                if tree.laws[child] == POINT:
                    chosen.setdefault(x, child)
                    continue
                q = tree.proposal(child, len(p))
                if dice.coin(min(1.0, p[x] / q[x])):
                    break
                p = residual(p, q)
            else:
                token = dice.choice(p)
                if token not in chosen:
                    return Verdict(kept, token)
                child = chosen[token]
            node = child
            kept.append(child)

    @staticmethod
    def new_room(vocab: int) -> tuple[np.ndarray, ...]:
        """r, what it was, marks (0 between calls), sums of blocks."""
        blocks = (vocab + BLOCK - 1) // BLOCK
        return np.empty(vocab), np.empty(vocab), np.zeros(vocab, np.uint8), np.empty(blocks)


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
    left: np.ndarray,
    before: np.ndarray,
    marks: np.ndarray,
    sums: np.ndarray,
) -> tuple[int, int, int, float, int]:
    """Where the walk goes from `node`: see `Walk`.

    `left` holds r, not normalised, once a rejection has changed it.
    """
    outcome, token, mass, bad, is_changed = EMITTED, 0, 1.0, -1, False
    for child in range(node + 1, len(tokens)):
        if parents[child] != node:
            continue
        x = tokens[child]
        if not 0 <= x < len(p):
            bad = child
            break
        if laws[child] != POINT:
            part, is_swor = slice(starts[rows[child]], starts[rows[child] + 1]), laws[child] == SWOR
            ids, probs = q_ids[part], q_probs[part]
            q_x, total = conditional(ids, probs, x, is_swor, marks)
            if not (q_x > 0.0 and total < math.inf):
                bad = child
                break
            scale, weight = mass / total, left[x] if is_changed else np.float64(p[x])
            used += 1
            if weight >= scale * q_x or uniforms[used - 1] * scale * q_x < weight:
                outcome, token, mass = child, x, weight
                break
            if not is_changed:
                left[:] = p
                is_changed = True
            mass = subtract(left, before, ids, probs, scale, mass, is_swor, marks, sums)
        marks[x] = TRIED
    if outcome == EMITTED:
        token, mass = (
            pick(left, uniforms[used], sums) if is_changed else pick(p, uniforms[used], sums)
        )
        used += 1
        if bad < 0 and 0 <= token < len(p) and marks[token]:
            outcome = chosen_child(token, node, tokens, parents, laws)
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and 0 <= tokens[child] < len(p):
            marks[tokens[child]] = 0
    return outcome, token, used, mass, bad


@njit(cache=True, nogil=True)
def chosen_child(
    token: int, node: int, tokens: np.ndarray, parents: np.ndarray, laws: np.ndarray
) -> int:
    """The first chosen child of `node` that holds `token`."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and laws[child] == POINT and tokens[child] == token:
            return child
    return EMITTED


@njit(cache=True, nogil=True)
def subtract(
    left: np.ndarray,
    before: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
    scale: float,
    mass: float,
    is_swor: bool,
    marks: np.ndarray,
    sums: np.ndarray,
) -> float:
    """left becomes (left - scale q)+; returns its mass. Nothing changes if none would be left."""
    for i in range(len(ids)):
        before[i] = left[ids[i]]
        if not (is_swor and marks[ids[i]] & TRIED):
            left[ids[i]] = max(before[i] - scale * probs[i], 0.0)
    total = 0.0
    for block in range(len(sums)):
        total += mass_of(left[block * BLOCK : (block + 1) * BLOCK])
    if total > NO_MASS * mass:
        return total
    for i in range(len(ids)):  # p = q up to rounding: that rejection had no chance
        left[ids[i]] = before[i]
    return mass


@njit(cache=True, nogil=True)
def pick(weights: np.ndarray, uniform: float, sums: np.ndarray) -> tuple[int, float]:
    """The token where the running sum of the weights [V] passes uniform x mass, and the mass."""
    total = 0.0
    for block in range(len(sums)):
        sums[block] = mass_of(weights[block * BLOCK : (block + 1) * BLOCK])
        total += sums[block]
    if not 0.0 < total < math.inf:
        return 0, total
    below, target, last = 0.0, uniform * total, 0
    for block in range(len(sums)):
        if below + sums[block] <= target:
            below += sums[block]
            continue
        for token in range(block * BLOCK, min((block + 1) * BLOCK, len(weights))):
            below += weights[token]
            if weights[token] > 0.0:
                last = token
                if below > target:
                    return token, total
    return last, total
