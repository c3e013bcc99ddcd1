"""Several adjacency matrices under one budget of bytes, on the device of the target's logits."""

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
MOST = 256  # entries of a row
ARRAY = "successors"  # name of a matrix, int32 [V, K], in a snapshot


class Matrices:
    """Matrices by key. All have one size, so a budget is a number of matrices: where there are
    more, the least recently used goes.

    tensors: whether they are torch tensors; None: where the logits are not on the CPU.
    """

    def __init__(self, *, entries: int, budget: int, tensors: bool | None = None) -> None:
        if not 1 <= entries <= MOST:
            raise ConfigError(f"entries must be in 1..{MOST}, got {entries}")
        self.entries, self.budget, self.tensors = entries, budget, tensors
        self._held: OrderedDict[Hashable, Matrix] = OrderedDict()  # least recent first

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(matrix.nbytes for matrix in self._held.values())

    def check(self, vocab: int) -> None:
        """Raises ConfigError unless one matrix fits into the budget."""
        size = vocab * self.entries * 4
        if size > self.budget:
            raise ConfigError(
                f"a matrix of {vocab} x {self.entries} ids takes {size / 2**20:.3g} MB, but the "
                f"budget is {self.budget / 2**20:.3g} MB; raise budget_mb or keep fewer entries"
            )

    def get(self, key: Hashable) -> Matrix | None:
        """The matrix of a key; None while there is none."""
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def learn(
        self, key: Hashable, tokens: np.ndarray, rows: np.ndarray, logits: torch.Tensor
    ) -> None:
        """Teaches the matrix of a key: see `Adjacency.learn`."""
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
        """Takes the rows of tokens of which the matrix of a key knows nothing."""
        array = snapshot.arrays[ARRAY]
        self.check(len(array))
        matrix = self.get(key)
        if matrix is None:
            matrix = Adjacency(*array.shape)
            self._put(key, matrix)
        matrix.fill(array)

    def drop(self, key: Hashable) -> None:
        """Nobody will use this matrix any more."""
        self._held.pop(key, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._held.clear()

    def _put(self, key: Hashable, matrix: Matrix) -> None:
        self._held[key] = matrix
        self._held.move_to_end(key)
        held = self.nbytes
        for other in list(self._held)[:-1]:
            if held <= self.budget:
                break
            held -= self._held.pop(other).nbytes


def snapshot(kind: str, matrix: np.ndarray) -> Snapshot:
    """A matrix [V, K] as what is saved; its tokens are those with known successors."""
    settings = {"vocab": matrix.shape[0], "entries": matrix.shape[1]}
    known = int(np.count_nonzero(matrix[:, 0] != UNKNOWN))
    return Snapshot(kind, {ARRAY: matrix}, settings, {"tokens": known})


def merge(snapshots: Many[Snapshot]) -> np.ndarray:
    """One matrix [V, K]: a token has the row of the last snapshot that knows it."""
    for other in snapshots[1:]:
        other.check(snapshots[0].settings)
    whole = snapshots[-1].arrays[ARRAY].copy()
    for earlier in snapshots[-2::-1]:
        is_new = whole[:, 0] == UNKNOWN
        whole[is_new] = earlier.arrays[ARRAY][is_new]
    return whole
