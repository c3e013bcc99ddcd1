"""What one row of the KV cache holds: tokens, scratch nodes, positions, hidden cells."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from weakref import ref

import numpy as np
import torch

from forerun.core.records import Sequence

TAIL = 64  # tokens compared again where a list that was synced before has grown


@dataclass(frozen=True)
class PartialPass:
    """Cells of a pass that ended early: the root and some nodes, in their first layers only."""

    num_layers: int  # layers 0 .. num_layers - 1 have these cells
    root: int  # token
    nodes: list[int]  # tokens
    parents: list[int]


@dataclass
class Slot:
    """What one row of the cache holds."""

    index: int
    tokens: list[int] = field(default_factory=list)  # committed: cell i holds tokens[i]
    nodes: list[int] = field(default_factory=list)  # scratch: cell len(tokens) + j holds nodes[j]
    parents: list[int] = field(default_factory=list)  # of scratch nodes; -1: the last committed
    where: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> node
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # of node (-1: root), if kept
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # the same of hidden rows
    positions: np.ndarray | None = None  # int64, of its first cells; None: cell i is position i
    dropped: np.ndarray | None = None  # bool [layers, kv_heads, n]: of its first cells, hidden ones
    partial: PartialPass | None = None  # behind the committed cells, in place of scratch
    owner: ref[Sequence] | None = None
    synced: list[int] | None = None  # the list that `tokens` last agreed with
    used: int = 0  # time of the last pass

    @property
    def is_free(self) -> bool:
        return self.owner is None or self.owner() is None

    @property
    def is_altered(self) -> bool:
        """Whether its cells have positions of their own, or some are hidden."""
        return self.positions is not None or self.dropped is not None

    def places(self, start: int, stop: int) -> np.ndarray:
        """Positions of the cells [start, stop), int64; beyond those given they go on by one."""
        cells = np.arange(start, stop)
        given = self.positions
        if given is None or not len(given):
            return cells
        last = len(given) - 1
        return given[np.minimum(cells, last)] + np.maximum(cells - last, 0)

    def set_positions(self, positions: np.ndarray) -> None:
        """Gives cells their positions, int64 [n]; committed cells that had others are dropped."""
        held = len(self.tokens)
        before = self.places(0, held)
        is_usual = np.array_equal(positions, np.arange(len(positions)))
        self.positions = None if is_usual else positions
        differ = np.flatnonzero(before != self.places(0, held))
        if len(differ):
            self.truncate(int(differ[0]))

    def restore(self) -> None:
        """Forgets altered cells, so that any sequence may use the slot."""
        if self.is_altered:
            self.truncate(0)
            self.positions = self.dropped = None

    def agreed(self, tokens: list[int]) -> int:
        """How many held tokens `tokens` begins with.

        Law: a list that was synced is appended to, or loses at most its last TAIL tokens before it
        grows again; any other change comes as a new list, which is compared in full.
        """
        num = len(self.tokens)
        low = max(num - TAIL, 0)
        if tokens is self.synced and self.tokens[low:] == tokens[low:num]:
            return num
        return common_prefix(self.tokens, tokens)

    def add(self, nodes: list[int], parents: list[int]) -> None:
        """Appends scratch nodes. Among equal siblings the last one counts."""
        first = len(self.nodes)
        self.nodes += nodes
        self.parents += parents
        self.where.update(zip(zip(parents, nodes, strict=True), itertools.count(first)))

    def truncate(self, length: int) -> None:
        """Keeps `length` committed tokens and no scratch."""
        del self.tokens[length:]
        if self.dropped is not None:
            self.dropped = self.dropped[:, :, :length]
        self.clear_scratch()

    def clear_scratch(self) -> None:
        self.nodes, self.parents, self.where = [], [], {}
        self.logits, self.hidden, self.partial = {}, {}, None

    def walk(self, tokens: list[int]) -> list[int]:
        """Scratch nodes that spell the longest beginning of `tokens`, from the top down."""
        found, node = [], -1
        for token in tokens:
            node = self.where.get((node, token), -2)
            if node < 0:
                break
            found.append(node)
        return found


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        mid = (low + high) // 2
        if a[low:mid] == b[low:mid]:
            low = mid
        else:
            high = mid
    return low
