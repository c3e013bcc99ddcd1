"""Verifies a batch of logits on a device, with one copy to the host.

Shapers with tensors and the sampling parameters (`_gpu_law.py`) are applied on the device. A
sampled sequence is verified by `_gpu.walk`, a greedy one by the argmax of every row. The same copy
holds the largest entries of each row, which drafters learn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs, TopEntries
from forerun.core.records import Verdict
from forerun.core.sampling import argmax
from forerun.core.tree import Tree
from forerun.errors import ForerunError
from forerun.verifiers._gpu import collect_verdicts, walk_trees
from forerun.verifiers._gpu_law import probabilities


def verdicts(trees: Many[Tree], laws: Many[TargetProbs], dice: Many[SeededDice]) -> list[Verdict]:
    """Verifies sequences with `TargetProbs.has_tensors`; sets `top_entries` if requested.

    Raises what the reference rules raise.
    """
    sizes = [len(tree) + 1 for tree in trees]
    logits = _shaped(laws)
    p = _probabilities(logits, laws, sizes)
    extra = HostCopy(logits, laws, sizes, p)
    drawn = sorted(p)
    own = [trees[i] for i in drawn], [dice[i] for i in drawn]
    try:
        walked, copied = walk_trees([p[i] for i in drawn], *own, extra.packed)
    except ForerunError:
        for tree, law in zip(trees, laws, strict=True):
            for node in range(-1, len(tree)):
                law[node]  # the host names the parameter or the logit that is wrong
        raise
    rows = extra.read(copied)
    found = {
        i: rows.follow(i, trees[i], law) for i, law in enumerate(laws) if law.sampling.is_greedy
    }
    for i, law in enumerate(laws):
        law.top_entries = rows.top_entries(i) if law.num_top_logits else None
    found |= zip(drawn, collect_verdicts(walked, [p[i] for i in drawn], *own), strict=True)
    return [found[i] for i in range(len(trees))]


def _shaped(laws: Many[TargetProbs]) -> Tensor:
    """The logits of all rows [N, V] before the temperature."""
    parts = [law.rows.logits for law in laws]
    parts = [part if part.element_size() >= 4 else part.float() for part in parts]
    parts = [law.tensor_logits(part) for law, part in zip(laws, parts, strict=True)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _probabilities(logits: Tensor, laws: Many[TargetProbs], sizes: list[int]) -> dict[int, Tensor]:
    """Distributions [n + 1, V] of the sampled sequences, by index."""
    alike: dict[tuple[float, ...], list[int]] = {}
    for i, s in enumerate(law.sampling for law in laws):
        if not s.is_greedy:
            alike.setdefault((s.divisor, s.top_k, s.top_p, s.min_p), []).append(i)
    parts, found = logits.split(sizes), dict[int, Tensor]()
    for own in alike.values():
        some = logits if len(own) == len(sizes) else torch.cat([parts[i] for i in own])
        p = probabilities(some, laws[own[0]].sampling)
        found |= zip(own, p.split([sizes[i] for i in own]), strict=True)
    return found


class HostCopy:
    """Packs the argmax and the top-K entries of each row into the copy of the verdicts."""

    def __init__(
        self, logits: Tensor, laws: Many[TargetProbs], sizes: list[int], p: dict[int, Tensor]
    ) -> None:
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.rows, self.vocab = logits.shape
        self.most = min(max(law.num_top_logits for law in laws), self.vocab)
        parts: list[Tensor] = []
        if any(law.sampling.is_greedy for law in laws):
            parts += torch.max(logits, -1)  # first index on ties
        if self.most:
            top = logits.topk(self.most, -1)
            highest = top.values[:, :1]  # subtracted first, for precision
            raw = (top.values - highest - (logits - highest).logsumexp(-1, keepdim=True)).exp()
            pairs = zip(raw.split(sizes), top.indices.split(sizes), strict=True)
            own = [p[i].gather(1, ids) if i in p else at_1 for i, (at_1, ids) in enumerate(pairs)]
            parts += [top.indices, raw, torch.cat(own)]
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

    def top_entries(self, i: int) -> TopEntries:
        """The top-K entries of one sequence."""
        ids, raw, own = (array[self.starts[i] : self.starts[i + 1]] for array in self._arrays[-3:])
        return TopEntries(ids, np.stack([raw, own]))

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
