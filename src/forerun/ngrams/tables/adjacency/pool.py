"""Adjacency matrices by key, within one memory budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Many

import numpy as np
import torch

from forerun.core.records import Snapshot
from forerun.errors import ConfigError
from forerun.ngrams.tables.adjacency.cpu import UNKNOWN, Adjacency
from forerun.ngrams.tables.adjacency.gpu import TensorAdjacency

Matrix = Adjacency | TensorAdjacency
MAX_ENTRIES = 256  # per row
ARRAY = "successors"  # name of a matrix, int32 [V, K], in a snapshot


class Matrices:
    """LRU cache of matrices by key, within a budget of bytes.

    tensors: use torch tensors; None: only if the logits are not on the CPU.
    """

    def __init__(self, *, entries: int, budget: int, tensors: bool | None = None) -> None:
        if not 1 <= entries <= MAX_ENTRIES:
            raise ConfigError(f"entries must be in 1..{MAX_ENTRIES}, got {entries}")
        self.entries, self.budget, self.tensors = entries, budget, tensors
        self._matrices: OrderedDict[Hashable, Matrix] = OrderedDict()  # least recently used first

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(matrix.nbytes for matrix in self._matrices.values())

    def check(self, vocab: int) -> None:
        """Raises ConfigError unless one matrix fits into the budget."""
        size = vocab * self.entries * 4
        if size > self.budget:
            raise ConfigError(
                f"a matrix of {vocab} x {self.entries} ids takes {size / 2**20:.3g} MB, more than "
                f"the budget of {self.budget / 2**20:.3g} MB; raise budget_mb or use fewer entries"
            )

    def get(self, key: Hashable) -> Matrix | None:
        """The matrix of a key, or None."""
        if key in self._matrices:
            self._matrices.move_to_end(key)
        return self._matrices.get(key)

    def learn(
        self, key: Hashable, tokens: np.ndarray, rows: np.ndarray, logits: torch.Tensor
    ) -> None:
        """`Adjacency.learn` on the matrix of a key."""
        is_tensor = logits.device.type != "cpu" if self.tensors is None else self.tensors
        matrix = self.get(key)
        if matrix is None or isinstance(matrix, TensorAdjacency) != is_tensor:
            known = None if matrix is None else matrix.to_numpy()
            vocab = logits.shape[1]
            matrix = (
                TensorAdjacency(vocab, self.entries, logits.device)
                if is_tensor
                else Adjacency(vocab, self.entries)
            )
            if known is not None:
                matrix.fill(known)
            self._put(key, matrix)
        matrix.learn(tokens, rows, logits)

    def restore(self, key: Hashable, snapshot: Snapshot) -> None:
        """Copies the rows of a snapshot for tokens without successors in the matrix of a key."""
        array = snapshot.arrays[ARRAY]
        self.check(len(array))
        matrix = self.get(key)
        if matrix is None:
            matrix = Adjacency(*array.shape)
            self._put(key, matrix)
        matrix.fill(array)

    def drop(self, key: Hashable) -> None:
        """Removes the matrix of a key."""
        self._matrices.pop(key, None)

    def clear(self) -> None:
        """Removes all matrices."""
        self._matrices.clear()

    def _put(self, key: Hashable, matrix: Matrix) -> None:
        self._matrices[key] = matrix
        self._matrices.move_to_end(key)
        total = self.nbytes
        for other in list(self._matrices)[:-1]:
            if total <= self.budget:
                break
            total -= self._matrices.pop(other).nbytes


def snapshot(kind: str, matrix: np.ndarray) -> Snapshot:
    """The snapshot of a matrix [V, K]; "tokens" counts the tokens with successors."""
    settings = {"vocab": matrix.shape[0], "entries": matrix.shape[1]}
    known = int(np.count_nonzero(matrix[:, 0] != UNKNOWN))
    return Snapshot(kind, {ARRAY: matrix}, settings, {"tokens": known})


def merge(snapshots: Many[Snapshot]) -> np.ndarray:
    """One matrix [V, K]: each token has its row of the last snapshot with successors of it."""
    for other in snapshots[1:]:
        other.check(snapshots[0].settings)
    merged = snapshots[-1].arrays[ARRAY].copy()
    for earlier in snapshots[-2::-1]:
        is_new = merged[:, 0] == UNKNOWN
        merged[is_new] = earlier.arrays[ARRAY][is_new]
    return merged
