"""Transport verification: drawn children are tried before chosen ones.

Hu et al., "Towards Optimal Multi-draft Speculative Decoding", 2025. Start with r = p. Accept a
drawn child x with probability min(1, r(x) / q(x)); after a rejection r becomes norm[(r - q)+]. Then
draw y ~ r: if a chosen child holds y descend to it, else emit y. As r is the residual, the emitted
token has distribution p. Chosen tokens E and one draw from a q without E are accepted with
probability p(E) + sum min(p, q), the maximum for any transport from drafts to tokens. Tried in tree
order, chosen tokens first, the probability is only p(E) + sum min(p, (1 - p(E)) q).

Verifies every tree. It equals recursive rejection if all nodes are drawn, and has the same
acceptance rate if all are chosen. Lossless.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.tree import POINT, SWOR, Tree
from forerun.utils.jit import compiled
from forerun.verifiers.base import (
    BLOCK,
    EMITTED,
    NO_MASS,
    TRIED,
    KernelVerifier,
    check_mass,
    conditional,
    draft_error,
    mass_of,
    reject_invalid,
    residual,
)


class Transport(KernelVerifier):
    """One kernel call per visited node. Not thread-safe."""

    def judge_node(self, p: np.ndarray, *more: Any) -> tuple[int, int, int, float, int]:
        return judge_node(p, *more)

    def verify_reference(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        node, kept = -1, list[int]()
        while True:
            p, chosen = laws[node].astype(np.float64), dict[int, int]()
            check_mass(p.sum(), len(kept))
            for child in tree.children(node):
                if why := draft_error(tree, child, len(p)):
                    reject_invalid(why)
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
    def new_buffers(vocab: int) -> tuple[np.ndarray, ...]:
        """r, the previous r, marks (0 between calls), sums of blocks."""
        blocks = (vocab + BLOCK - 1) // BLOCK
        return np.empty(vocab), np.empty(vocab), np.zeros(vocab, np.uint8), np.empty(blocks)


@compiled
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
    left: np.ndarray,
    before: np.ndarray,
    marks: np.ndarray,
    sums: np.ndarray,
) -> tuple[int, int, int, float, int]:
    """One step of the walk from `node`: see `KernelVerifier`.

    `left` holds r, not normalised, after the first rejection.
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


@compiled
def chosen_child(
    token: int, node: int, tokens: np.ndarray, parents: np.ndarray, laws: np.ndarray
) -> int:
    """The first chosen child of `node` that holds `token`."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and laws[child] == POINT and tokens[child] == token:
            return child
    return EMITTED


@compiled
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
    """Replaces left by (left - scale q)+ and returns its mass; no change if that mass is 0."""
    for i in range(len(ids)):
        before[i] = left[ids[i]]
        if not (is_swor and marks[ids[i]] & TRIED):
            left[ids[i]] = max(before[i] - scale * probs[i], 0.0)
    total = 0.0
    for block in range(len(sums)):
        total += mass_of(left[block * BLOCK : (block + 1) * BLOCK])
    if total > NO_MASS * mass:
        return total
    for i in range(len(ids)):  # p = q up to rounding: rejection has probability 0
        left[ids[i]] = before[i]
    return mass


@compiled
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
