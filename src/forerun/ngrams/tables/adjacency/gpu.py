"""The adjacency matrix of Token Recycling as tensors: it stays where the target's logits are.

Same rows and same trees as `adjacency`, token for token (tests compare them). A level of all trees
of a batch is one gather, and only the finished tokens cross to the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from forerun.core.tree import Tree, points
from forerun.core.tree_template import Shape
from forerun.ngrams.tables.adjacency.cpu import UNKNOWN

LOW = 0xFFFFFFFF
SIGN = 0x7FFFFFFF


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a shape's places come from; place -1, the last column, is the root."""

    shape: Shape
    parents: torch.Tensor  # int64 [places]
    ranks: torch.Tensor  # int64 [places], below K
    can_be: torch.Tensor  # bool [places]: rank and depth are within bounds
    bounds: list[int]  # level i is the places [bounds[i] : bounds[i + 1]]


class TensorAdjacency:
    """Token -> its latest successors, in torch."""

    def __init__(self, vocab: int, entries: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.full((vocab, entries), UNKNOWN, dtype=torch.int32, device=device)
        self._layouts: dict[tuple[int, int], Layout] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
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
        """Takes the rows of a matrix [V, K] where its own have nothing."""
        rows = torch.from_numpy(known).to(self.matrix.device)
        self.matrix = rows.where(self.matrix[:, :1] == UNKNOWN, self.matrix)

    @torch.inference_mode()
    def draft(self, roots: Many[int], shape: Shape, depth: int) -> list[Tree]:
        """The places of `shape` down to `depth`, filled level by level below each root token."""
        layout = self._layout(shape, depth)
        places = len(shape.parents)
        tokens = self.matrix.new_full((len(roots), places + 1), UNKNOWN)
        tokens[:, places] = self.matrix.new_tensor(list(roots))
        for start, stop in zip(layout.bounds, layout.bounds[1:], strict=False):
            level = slice(start, stop)
            above = tokens[:, layout.parents[level]]
            found = self.matrix[above.clamp(min=0).long(), layout.ranks[level]]
            tokens[:, level] = found.where((above != UNKNOWN) & layout.can_be[level], UNKNOWN)
        return [_compact(line, shape.parents) for line in tokens[:, :places].cpu().numpy()]

    @torch.inference_mode()
    def learn(self, tokens: np.ndarray, rows: np.ndarray, logits: torch.Tensor) -> None:
        """Writes the top ids of logits [n, V] at `rows` int64 [m] into the matrix at `tokens`.

        Logits are compared in float32, ties go to the lowest id. Tokens must differ.
        """
        device, entries = self.matrix.device, self.matrix.shape[1]
        wanted = logits.to(device)[torch.from_numpy(rows).to(device)]
        top = keys(wanted).topk(min(entries, logits.shape[1])).values
        ids = torch.full((len(rows), entries), UNKNOWN, dtype=torch.int32, device=device)
        is_known = top >> 32 > keys(torch.full((1, 1), -torch.inf, device=device)) >> 32
        ids[:, : top.shape[1]] = (LOW - (top & LOW)).where(is_known, UNKNOWN).int()
        self.matrix[torch.from_numpy(tokens).to(device)] = ids

    def _layout(self, shape: Shape, depth: int) -> Layout:
        key = id(shape), depth  # the layout keeps its shape alive
        if key not in self._layouts:
            self._layouts[key] = _layout(shape, depth, self.matrix)
        return self._layouts[key]


def keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 [n, V] in the order of logits [n, V] as float32, equal ones by falling id; all differ.

    A float's bits, the lower ones inverted where it is negative, are ordered as the float is.
    """
    wide = logits.float() + 0.0  # no negative zero
    bits = wide.masked_fill(wide.isnan(), -torch.inf).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ SIGN, bits)
    return (ordered << 32) | (LOW - torch.arange(logits.shape[1], device=logits.device))


def _layout(shape: Shape, depth: int, matrix: torch.Tensor) -> Layout:
    ranks = np.arange(len(shape.parents)) - shape.firsts[shape.parents]
    can_be = (ranks < matrix.shape[1]) & (shape.depths <= depth)
    last = min(depth, int(shape.depths.max(initial=0)))
    return Layout(
        shape,
        torch.from_numpy(shape.parents.astype(np.int64)).to(matrix.device),
        torch.from_numpy(np.where(can_be, ranks, 0).astype(np.int64)).to(matrix.device),
        torch.from_numpy(can_be).to(matrix.device),
        np.searchsorted(shape.depths, np.arange(1, last + 2)).tolist(),
    )


def _compact(tokens: np.ndarray, parents: np.ndarray) -> Tree:
    """The tree of the places [N] that hold a token."""
    is_node = tokens != UNKNOWN
    where = np.append(np.cumsum(is_node) - 1, -1)  # place -> node; place -1 is the root
    return points(tokens[is_node], where[parents[is_node]].astype(np.int32))
