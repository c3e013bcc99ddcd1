"""The default verifier: recursive rejection with compiled, sparse kernels.

For the same uniforms the outcome is that of `recursive` (Miao et al., "SpecInfer", 2023; Jeon et
al., "Recursive Speculative Decoding", 2024). Uses the kernels of `_rejection.py`. Lossless.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cache
from typing import Any

import numpy as np

from forerun.core.dice import Dice, SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import FLOAT32, Verdict
from forerun.core.tree import EMPTY, Tree
from forerun.verifiers._rejection import judge_node, scratch_ends, walk
from forerun.verifiers.base import KernelVerifier, arrays, reject_recursively

NO_NODES = np.empty(0, np.int32)


class Speculative(KernelVerifier):
    """One kernel call per tree, or per visited node if a shaper changes the distribution.

    tensors: verify a batch with torch on the device of its logits; None: if that is an accelerator.
    Sequences with a constraint that works on the host only are verified there.
    Not thread-safe.
    """

    def __init__(self, *, tensors: bool | None = None) -> None:
        super().__init__()
        self.tensors = tensors

    def judge_node(self, p: np.ndarray, *more: Any) -> tuple[int, int, int, float, int]:
        return judge_node(p, *more)

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        if not isinstance(dice, SeededDice):
            return super().verify(tree, laws, dice)
        logits = laws.unshaped()
        if logits is None:
            return super().verify(tree, laws, dice)
        nodes, vocab = len(tree.tokens), logits.shape[1]
        uniforms = dice.peek(2 * nodes + 1)
        probs = np.empty(logits.shape, FLOAT32)
        kept = np.empty(nodes, np.int32) if nodes else NO_NODES
        inverse = 1.0 / laws.sampling.divisor
        (buffer,) = self._buffers_for(vocab)
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
            buffer,
        )
        if not mass > 0.0:  # p or q is invalid; the walk node by node raises the error
            return super().verify(tree, laws, dice)
        dice.skip(used)
        nodes_kept = kept[:count].tolist()
        laws.set_probs([-1, *nodes_kept], probs)
        return Verdict(nodes_kept, token)

    def verify_reference(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        return reject_recursively(tree, laws, dice)

    @staticmethod
    def new_buffers(vocab: int) -> tuple[np.ndarray]:
        buffer = np.zeros(scratch_ends(vocab)[-1])
        buffer[0] = 1.0
        return (buffer,)

    def verify_all(
        self, trees: Many[Tree], laws: Many[TargetProbs], dice: Many[Dice]
    ) -> list[Verdict]:
        # all rows of a forward pass are on one device
        is_on_device = laws[0].rows.is_on_device if self.tensors is None else self.tensors
        if not is_on_device:
            return super().verify_all(trees, laws, dice)
        there = [
            i for i, law in enumerate(laws) if law.has_tensors and isinstance(dice[i], SeededDice)
        ]
        if not there:
            return super().verify_all(trees, laws, dice)
        from forerun.verifiers import _gpu_verdicts  # loads more kernels

        chosen = ([part[i] for i in there] for part in (trees, laws, dice))
        found = dict(zip(there, _gpu_verdicts.verdicts(*chosen), strict=True))  # type: ignore[arg-type]
        return [
            found[i] if i in found else self.verify(tree, laws[i], dice[i])
            for i, tree in enumerate(trees)
        ]

    def warm_up(self) -> None:
        super().warm_up()
        _warm_up_walk()
        import torch

        if torch.cuda.is_available() if self.tensors is None else self.tensors:
            from forerun.verifiers import _gpu

            _gpu.warm_up()


@cache
def _warm_up_walk() -> None:
    flat, ints = arrays(EMPTY), np.empty(1, np.int32)
    buffers: tuple[np.ndarray, ...] = Speculative.new_buffers(2)
    row, uniforms = np.zeros((1, 2), np.float32), np.full(1, 0.75)
    walk(row, 1.0, row.copy(), ints, uniforms, *flat, *buffers)
