"""Adjacency matrix of Token Recycling in NumPy: the latest top successors of every token.

Luo et al., "Turning Trash into Treasure", 2024. Row t has the ids of the target's K largest logits
after the latest occurrence of token t, best first, -1 if unknown: int32 [V, K]. `gpu.py` has the
same matrix on any torch device.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cache

import numpy as np
import torch

from forerun.core.tree import Tree, points
from forerun.core.tree_template import Shape, grid
from forerun.ngrams.tables.logits.top_k import select_above
from forerun.utils.jit import compiled

UNKNOWN = -1


class Adjacency:
    """Latest successors per token, in NumPy."""

    def __init__(self, vocab: int, entries: int) -> None:
        self.matrix = np.full((vocab, entries), UNKNOWN, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.matrix.nbytes

    def successors(self, token: int) -> np.ndarray:
        """Known successors of a token, best first. int32 [k], k <= K."""
        row = self.matrix[token]
        return row[row != UNKNOWN]

    def to_numpy(self) -> np.ndarray:
        """A copy of the matrix. int32 [V, K]."""
        return self.matrix.copy()

    def fill(self, known: np.ndarray) -> None:
        """Copies the rows of a matrix [V, K] for tokens without successors here."""
        is_new = self.matrix[:, 0] == UNKNOWN
        self.matrix[is_new] = known[is_new]

    def draft(self, roots: Many[int], shape: Shape, depth: int) -> list[Tree]:
        """One tree per root token: the places of `shape` down to `depth`."""
        return [self._draft(root, shape, depth) for root in roots]

    def learn(self, tokens: np.ndarray, rows: np.ndarray, logits: torch.Tensor) -> None:
        """Writes the top ids of logits [n, V] at `rows` int64 [m] into the matrix at `tokens`.

        Logits are compared in float32; ties: lowest id. Tokens must be distinct.
        """
        if logits.dtype != torch.float32:
            logits, rows = logits[torch.from_numpy(rows)].float(), np.arange(len(rows))
        flat, stride = flattened(logits)
        learn_rows(self.matrix, tokens, rows, flat, stride, logits.shape[1])

    def _draft(self, root: int, shape: Shape, depth: int) -> Tree:
        places = len(shape.parents)
        tokens, parents = np.empty(places, np.int32), np.empty(places, np.int32)
        nodes = fill_rows(
            self.matrix, root, shape.depths, shape.widths, shape.firsts, depth, tokens, parents
        )
        return points(tokens[:nodes], parents[:nodes])


def flattened(logits: torch.Tensor) -> tuple[np.ndarray, int]:
    """Logits [n, V] as a flat array, and the stride of its rows."""
    count, vocab = logits.shape
    if logits.stride(1) != 1 or logits.stride(0) < vocab:
        logits = logits.contiguous()
    stride = logits.stride(0)
    flat = logits.as_strided(((count - 1) * stride + vocab,), (1,))
    return flat.detach().numpy(), stride


@compiled
def fill_rows(
    matrix: np.ndarray,
    root: int,
    depths: np.ndarray,
    widths: np.ndarray,
    firsts: np.ndarray,
    depth: int,
    tokens: np.ndarray,
    parents: np.ndarray,
) -> int:
    """Fills a tree breadth first: the child of rank r of a node with token t is matrix[t, r].

    A place without a known successor stays empty, with all places below it. Writes tokens and
    parents of the nodes; returns their number.
    """
    places, entries, nodes = len(depths), matrix.shape[1], 0
    where = np.full(places + 1, -2, np.int32)  # place + 1 -> node
    where[0] = -1
    for place in range(-1, places):
        node = where[place + 1]
        if node == -2 or widths[place] == 0:
            continue
        if place >= 0 and depths[place] >= depth:
            break
        above = root if node < 0 else tokens[node]
        for rank in range(min(widths[place], entries)):
            token = matrix[above, rank]
            if token == UNKNOWN:
                break
            tokens[nodes], parents[nodes] = token, node
            where[firsts[place] + rank + 1] = nodes
            nodes += 1
    return nodes


@compiled
def learn_rows(
    matrix: np.ndarray,
    tokens: np.ndarray,
    rows: np.ndarray,
    flat: np.ndarray,
    stride: int,
    vocab: int,
) -> None:
    """matrix[tokens[i]] = ids of the largest of the `vocab` logits from rows[i] * stride.

    -inf and NaN are skipped.
    """
    values = np.empty(matrix.shape[1], flat.dtype)
    for i in range(len(tokens)):
        start = rows[i] * stride
        select_largest(flat[start : start + vocab], matrix[tokens[i]], values)


@compiled
def select_largest(row: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
    """Ids of the K largest entries of row [V], falling, padded with UNKNOWN; ties: lowest ids."""
    ids[:] = UNKNOWN
    values[:] = -np.inf
    select_above(row, ids, values)


@cache
def warm_up() -> None:
    """Compiles the kernels of the matrix, or loads them from the cache."""
    matrix = Adjacency(2, 2)
    matrix.learn(np.zeros(1, np.int64), np.zeros(1, np.int64), torch.zeros(1, 2))
    matrix.draft([0], grid(1).first(1), 1)
