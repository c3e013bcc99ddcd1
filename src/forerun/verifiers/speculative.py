"""The default verifier: recursive rejection that touches only what a proposal touches.

The law and, for the same uniforms, the outcome of `recursive` (Miao et al., "SpecInfer", 2023; Jeon
et al., "Recursive Speculative Decoding", 2024). A rejection changes p only on q's support, some ten
of V tokens for a drafter that looks n-grams up, so the residual is kept unnormalised: p itself, the
changed weights, and the mass of both. Only the final draw reads the whole row. Lossless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from forerun.core.dice import Dice, SeededDice
from forerun.core.logits import Laws
from forerun.core.records import FLOAT32, Verdict
from forerun.core.tree import EMPTY, POINT, SWOR, Tree
from forerun.utils.jit import bare
from forerun.verifiers._softmax import softmax_into
from forerun.verifiers.base import (
    BLOCK,
    CHANGED,
    EMITTED,
    IN_Q,
    NO_MASS,
    TRIED,
    Walk,
    arrays,
    conditional,
    mass_of,
    reject_recursively,
)

INT32 = np.dtype(np.int32)  # NumPy looks up a type, not a dtype
NO_NODES = np.empty(0, INT32)
CANCELLED = 1 / 16  # below this share of the mass before, a difference is summed anew


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


class Speculative(Walk):
    """One kernel call per visited node. One instance serves one thread.

    tensors: a batch is judged by `tensor_judge` where the rows lie; None: if that is an
    accelerator. Sequences with more than a temperature are judged on the host.
    """

    def __init__(self, *, tensors: bool | None = None) -> None:
        super().__init__()
        self.tensors = tensors

    def judge(self, p: np.ndarray, *more: Any) -> tuple[int, int, int, float, int]:
        return judge(p, *more)

    def verify(self, tree: Tree, laws: Laws, dice: Dice) -> Verdict:
        if not isinstance(dice, SeededDice):
            return super().verify(tree, laws, dice)
        logits = laws.unshaped()
        if logits is None:
            return super().verify(tree, laws, dice)
        nodes, vocab = len(tree.tokens), logits.shape[1]
        uniforms = dice.peek(2 * nodes + 1)
        probs = np.empty(logits.shape, FLOAT32)
        kept = np.empty(nodes, INT32) if nodes else NO_NODES
        inverse = 1.0 / max(laws.sampling.temperature, 1e-30)
        (room,) = self._rooms.get(vocab) or self._room(vocab)
        count, token, used, mass = walk(
            logits,
            inverse,
            probs,
            kept,
            uniforms,
            tree.tokens,
            tree.parents,
            tree.laws,
            tree.rows,
            tree.starts,
            tree.q_ids,
            tree.q_probs,
            room,
        )
        if not mass > 0.0:  # a law or a draft is broken: said by the way of single nodes
            return super().verify(tree, laws, dice)
        dice.skip(used)
        nodes_kept = kept[:count].tolist() if count else []
        laws.hold([-1, *nodes_kept], probs)
        return Verdict(nodes_kept, token)

    def plainly(self, tree: Tree, laws: Laws, dice: Dice) -> Verdict:
        return reject_recursively(tree, laws, dice)

    @staticmethod
    def new_room(vocab: int) -> tuple[np.ndarray]:
        room = np.zeros(places(vocab)[-1])
        room[0] = 1.0
        return (room,)

    def verify_all(self, trees: Many[Tree], laws: Many[Laws], dice: Many[Dice]) -> list[Verdict]:
        # all rows of a pass lie in one place
        is_away = laws[0].rows.is_away if self.tensors is None else self.tensors
        if not is_away:  # `super` is a call more, of code that a pass has made cold
            return list(map(self.verify, trees, laws, dice))
        there = [
            i
            for i, law in enumerate(laws)
            if law.is_temperature_only and isinstance(dice[i], SeededDice)
        ]
        if not there:
            return super().verify_all(trees, laws, dice)
        from forerun.verifiers import _gpu_verdicts as tensor_judge  # compiles kernels of its own

        chosen = ([part[i] for i in there] for part in (trees, laws, dice))
        found = dict(zip(there, tensor_judge.verdicts(*chosen), strict=True))  # type: ignore[arg-type]
        return [
            found[i] if i in found else self.verify(tree, laws[i], dice[i])
            for i, tree in enumerate(trees)
        ]

    def warm_up(self) -> None:
        super().warm_up()
        _warm_up_walk()
        import torch

        if torch.cuda.is_available() if self.tensors is None else self.tensors:
            from forerun.verifiers import _gpu as tensor_walk

            tensor_walk.warm_up()


@cache
def _warm_up_walk() -> None:
    flat, ints = arrays(EMPTY), np.empty(1, np.int32)
    room: tuple[np.ndarray, ...] = Speculative.new_room(2)
    row, uniforms = np.zeros((1, 2), np.float32), np.full(1, 0.75)
    walk(row, 1.0, row.copy(), ints, uniforms, *flat, *room)


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
