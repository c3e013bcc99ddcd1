"""Verifies a batch of logits on a device, with one copy to the host.

A sampled sequence is verified by `_gpu.walk`, a greedy one by the argmax of every row. The same
copy holds the largest logits of each row, which drafters learn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs, TopLogits
from forerun.core.records import Verdict
from forerun.core.sampling import argmax
from forerun.core.tree import Tree
from forerun.verifiers._gpu import collect_verdicts, walk_trees


def verdicts(trees: Many[Tree], laws: Many[TargetProbs], dice: Many[SeededDice]) -> list[Verdict]:
    """Verifies sequences with `TargetProbs.is_temperature_only`; sets `top_logits` if requested.

    Raises what the reference rules raise.
    """
    logits = torch.cat([law.rows.logits for law in laws]) if len(laws) > 1 else laws[0].rows.logits
    logits = logits if logits.element_size() >= 4 else logits.float()  # [N, V]
    sizes = [len(tree) + 1 for tree in trees]
    drawn = [i for i, law in enumerate(laws) if not law.sampling.is_greedy]
    extra = HostCopy(logits, laws, sizes)
    p = _probabilities(logits, laws, sizes, drawn)
    own = [trees[i] for i in drawn], [dice[i] for i in drawn]
    walked, copied = walk_trees(p, *own, extra.packed)
    rows = extra.read(copied)
    found = {
        i: rows.follow(i, trees[i], law) for i, law in enumerate(laws) if law.sampling.is_greedy
    }
    for i, law in enumerate(laws):
        law.top_logits = rows.top_logits(i, law) if law.num_top_logits else None
    found |= zip(drawn, collect_verdicts(walked, p, *own), strict=True)
    return [found[i] for i in range(len(trees))]


def _probabilities(
    logits: Tensor, laws: Many[TargetProbs], sizes: list[int], drawn: list[int]
) -> list[Tensor]:
    """Distributions [n + 1, V] of the sampled sequences."""
    if not drawn:
        return []
    parts = logits.split(sizes)
    scales = {laws[i].sampling.divisor for i in drawn}
    if len(scales) == 1 and len(drawn) == len(sizes):  # common: one softmax for the whole batch
        return list((logits / scales.pop()).softmax(-1).split(sizes))
    return [(parts[i] / laws[i].sampling.divisor).softmax(-1) for i in drawn]


class HostCopy:
    """Packs the argmax and the top-K logits of each row into the copy of the verdicts."""

    def __init__(self, logits: Tensor, laws: Many[TargetProbs], sizes: list[int]) -> None:
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.rows, self.vocab = logits.shape
        self.most = min(max(law.num_top_logits for law in laws), self.vocab)
        parts: list[Tensor] = []
        if any(law.sampling.is_greedy for law in laws):
            parts += torch.max(logits, -1)  # first index on ties
        if self.most:
            top = logits.topk(self.most, -1)
            below = logits - top.values[:, :1]
            own = _scaled(below, laws, sizes)
            parts += [*top, below.logsumexp(-1), own.logsumexp(-1)]
        self.widths = [part.shape[1] if part.dim() == 2 else 1 for part in parts]
        self.packed = torch.cat([part.double().reshape(-1) for part in parts]) if parts else None
        self._arrays: list[np.ndarray] = []

    def read(self, copied: np.ndarray) -> HostCopy:
        """Unpacks the numbers [m] that were copied to the host."""
        ends = np.cumsum([self.rows * width for width in self.widths])
        pieces = np.split(copied, ends[:-1]) if self.widths else []
        pairs = zip(pieces, self.widths, strict=True)
        self._arrays = [piece.reshape(self.rows, width) for piece, width in pairs]
        return self

    def top_logits(self, i: int, law: TargetProbs) -> TopLogits:
        """The top-K logits of one sequence."""
        part = slice(self.starts[i], self.starts[i + 1])
        logits, ids, raw, own = (array[part] for array in self._arrays[-4:])
        temperature = 1.0 if law.sampling.is_greedy else law.sampling.divisor
        return TopLogits(ids, logits, np.concatenate([raw, own], 1), temperature)

    def follow(self, i: int, tree: Tree, law: TargetProbs) -> Verdict:
        """The greedy verdict: descends while a child holds the argmax of its parent's row."""
        highest, best = (
            array[self.starts[i] : self.starts[i + 1], 0] for array in self._arrays[:2]
        )
        node, kept = -1, list[int]()
        while True:
            if not math.isfinite(highest[node + 1]):
                argmax(law.logits(node))  # raises the error
            token = int(best[node + 1])
            hits = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
            if not len(hits):
                return Verdict(kept, token)
            node = int(hits[0])
            kept.append(node)


def _scaled(logits: Tensor, laws: Many[TargetProbs], sizes: list[int]) -> Tensor:
    """Logits divided by each sequence's temperature; greedy ones unchanged."""
    scales = [1.0 if s.is_greedy else s.divisor for s in (law.sampling for law in laws)]
    if len(set(scales)) == 1:
        return logits / scales[0]
    parts: Any = zip(logits.split(sizes), scales, strict=True)
    return torch.cat([part / scale for part, scale in parts])
