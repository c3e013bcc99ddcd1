"""Rows of a tree that is computed path by path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forerun.runner.forward_batch import Work


class PathRows:
    """The rows of a work, collected while its paths are computed one after the other."""

    def __init__(self, work: Work) -> None:
        old = [] if work.pending else work.slot.nodes
        self._tokens = [*old, *work.nodes]
        self._parents = [*([] if work.pending else work.slot.parents), *work.new_parents]
        self._first = len(old)  # nodes before it were computed earlier
        self._rows: list[list[Tensor] | None] = [None] * work.num_rows

    def put(self, rows: Any, outputs: Any) -> None:
        """Sets rows; negative indices belong to earlier nodes and are skipped."""
        for at, row in enumerate(rows):
            if row >= 0:
                self._rows[row] = [part[at] for part in outputs]

    def leaf_paths(self) -> Iterator[tuple[list[int], list[int]]]:
        """Per new leaf: its path as indices of new nodes (earlier nodes: negative), its tokens."""
        inner = set(self._parents[self._first :])
        for leaf in range(self._first, len(self._tokens)):
            if leaf in inner:
                continue
            path, node = [], leaf
            while node >= 0:
                path.append(node)
                node = self._parents[node]
            path.reverse()
            numbers = [n - self._first if n >= self._first else -(1 << 30) for n in path]
            yield numbers, [self._tokens[n] for n in path]

    def stacked(self, first: int = 0) -> tuple[Tensor, ...]:
        """The outputs for the rows from `first` on."""
        rows = self._rows[first:]
        return tuple(map(torch.stack, zip(*rows, strict=True)))  # type: ignore[arg-type]
