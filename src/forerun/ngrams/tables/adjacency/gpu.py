"""Adjacency matrix of Token Recycling as a tensor on the device of the target's logits.

Rows and trees equal those of `cpu.py` (tests compare them). A level of all trees of a batch is one
gather; only the finished tokens are copied to the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from forerun.core.tree import Tree, points
from forerun.core.tree_template import Shape
from forerun.ngrams.tables.adjacency.cpu import UNKNOWN
from forerun.utils.device_copy import to_device

LOW = 0xFFFFFFFF
SIGN = 0x7FFFFFFF


@dataclass(frozen=True)
class Layout:
    """Parents and ranks of a shape's places; place -1, the last column, is the root."""

    shape: Shape
    parents: torch.Tensor  # int64 [places]
    ranks: torch.Tensor  # int64 [places], below K
    is_valid: torch.Tensor  # bool [places]: rank and depth are within bounds
    bounds: list[int]  # level i has the places [bounds[i] : bounds[i + 1]]


class TensorAdjacency:
    """Latest successors per token, in torch."""

    def __init__(self, vocab: int, entries: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.full((vocab, entries), UNKNOWN, dtype=torch.int32, device=device)
        self._layouts: dict[tuple[int, int], Layout] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.matrix.untyped_storage().nbytes()

    def successors(self, token: int) -> np.ndarray:
        """Known successors of a token, best first. int32 [k], k <= K."""
        row = self.matrix[token].cpu().numpy()
        return row[row != UNKNOWN]

    def to_numpy(self) -> np.ndarray:
        """A copy of the matrix. int32 [V, K]."""
        return self.matrix.cpu().numpy().copy()

    @torch.inference_mode()
    def fill(self, known: np.ndarray) -> None:
        """Copies the rows of a matrix [V, K] for tokens without successors here."""
        rows = to_device(known, self.matrix.device)
        self.matrix = rows.where(self.matrix[:, :1] == UNKNOWN, self.matrix)

    @torch.inference_mode()
    def draft(self, roots: Many[int], shape: Shape, depth: int) -> list[Tree]:
        """One tree per root token: the places of `shape` down to `depth`."""
        layout = self._layout(shape, depth)
        places = len(shape.parents)
        tokens = self.matrix.new_full((len(roots), places + 1), UNKNOWN)
        tokens[:, places] = to_device(np.array(roots, np.int32), self.matrix.device)
        for start, stop in zip(layout.bounds, layout.bounds[1:], strict=False):
            level = slice(start, stop)
            above = tokens[:, layout.parents[level]]
            found = self.matrix[above.clamp(min=0).long(), layout.ranks[level]]
            tokens[:, level] = found.where((above != UNKNOWN) & layout.is_valid[level], UNKNOWN)
        return [_compact(line, shape.parents) for line in tokens[:, :places].cpu().numpy()]

    @torch.inference_mode()
    def learn(self, tokens: np.ndarray, rows: np.ndarray, logits: torch.Tensor) -> None:
        """Writes the top ids of logits [n, V] at `rows` int64 [m] into the matrix at `tokens`.

        Logits are compared in float32; ties: lowest id. Tokens must be distinct.
        """
        device, entries = self.matrix.device, self.matrix.shape[1]
        wanted = logits.to(device)[to_device(rows, device)]
        top = keys(wanted).topk(min(entries, logits.shape[1])).values
        ids = torch.full((len(rows), entries), UNKNOWN, dtype=torch.int32, device=device)
        is_known = top >> 32 > keys(torch.full((1, 1), -torch.inf, device=device)) >> 32
        ids[:, : top.shape[1]] = (LOW - (top & LOW)).where(is_known, UNKNOWN).int()
        self.matrix[to_device(tokens, device)] = ids

    def _layout(self, shape: Shape, depth: int) -> Layout:
        key = id(shape), depth  # unique: the layout keeps a reference to its shape
        if key not in self._layouts:
            self._layouts[key] = _layout(shape, depth, self.matrix)
        return self._layouts[key]


def keys(logits: torch.Tensor) -> torch.Tensor:
    """Distinct int64 sort keys [n, V] of logits [n, V] as float32; ties by falling id.

    The bits of a float sort like the float if the lower bits of negative floats are inverted.
    """
    wide = logits.float() + 0.0  # no negative zero
    bits = wide.masked_fill(wide.isnan(), -torch.inf).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ SIGN, bits)
    return (ordered << 32) | (LOW - torch.arange(logits.shape[1], device=logits.device))


def _layout(shape: Shape, depth: int, matrix: torch.Tensor) -> Layout:
    ranks = np.arange(len(shape.parents)) - shape.firsts[shape.parents]
    is_valid = (ranks < matrix.shape[1]) & (shape.depths <= depth)
    last = min(depth, int(shape.depths.max(initial=0)))
    return Layout(
        shape,
        to_device(shape.parents.astype(np.int64), matrix.device),
        to_device(np.where(is_valid, ranks, 0).astype(np.int64), matrix.device),
        to_device(is_valid, matrix.device),
        np.searchsorted(shape.depths, np.arange(1, last + 2)).tolist(),
    )


def _compact(tokens: np.ndarray, parents: np.ndarray) -> Tree:
    """The tree of the places [N] with a token."""
    is_node = tokens != UNKNOWN
    where = np.append(np.cumsum(is_node) - 1, -1)  # place -> node; place -1 is the root
    return points(tokens[is_node], where[parents[is_node]].astype(np.int32))
