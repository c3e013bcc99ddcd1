"""Input of a decoder: per sequence its pending tokens and tree nodes, packed for a pass.

`core/forward_batch.py` has the request of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from forerun.core.tree import Resume
from forerun.runner.slots import PartialPass, Slot
from forerun.runner.span import Span
from forerun.utils.jit import compiled

NO_NODES = np.zeros(0, dtype=np.int32)
MAX_JOINED_TOKENS = 8  # up to this number of pending tokens, no separate prefill pass
FIELDS = 6  # of a span in the kernels: slot, base, stop, rows, first row, address of sees


@dataclass
class Work:
    """Rows of one sequence in a pass: pending tokens, then new scratch nodes.

    Law of order: cells of a slot are committed tokens, pending ones, then scratch nodes, oldest
    first; pending tokens come only into a slot without scratch.
    """

    slot: Slot
    pending: list[int]
    nodes: list[int] = field(default_factory=list)  # tokens of the new scratch nodes
    parents: np.ndarray = field(default_factory=lambda: NO_NODES)  # int32, of old and new nodes

    @property
    def num_rows(self) -> int:
        return len(self.pending) + len(self.nodes)

    @property
    def first(self) -> int:
        """The first row with logits: the root, or the first node."""
        return max(len(self.pending) - 1, 0)

    @property
    def stop(self) -> int:
        """One past the last visible cell."""
        return len(self.slot.tokens) + len(self.pending) + len(self.parents)

    @property
    def new_parents(self) -> list[int]:
        """Parents of `nodes`."""
        return self.parents[len(self.parents) - len(self.nodes) :].tolist()

    @property
    def is_altered(self) -> bool:
        """Whether the slot has cells with explicit positions, or hidden cells."""
        return self.slot.is_altered

    @property
    def span(self) -> Span:
        """Cells, positions and visibility of the rows."""
        slot, base, num, rows = self.slot, len(self.slot.tokens), len(self.pending), self.num_rows
        past = None if slot.positions is None else slot.places(0, base)
        if not len(self.parents):
            places = slot.places(base, base + num)
            return Span(slot.index, base, places, rows, None, past, slot.dropped)
        count = num + len(self.parents)
        places, sees = np.empty(count, np.int64), np.empty((count, count), np.bool_)
        lay_out(base, num, self.parents, places, sees)
        if slot.positions is not None:  # nodes continue from the position of the root
            root = base + num - 1
            places[num:] += slot.places(root, root + 1) - root
            places[:num] = slot.places(base, base + num)
        return Span(slot.index, base, places, rows, sees[count - rows :], past, slot.dropped)

    def keep(self) -> None:
        """Records computed rows: pending tokens become committed, new nodes scratch."""
        if self.pending:
            self.slot.clear_scratch()
            self.slot.tokens += self.pending
        if self.nodes:
            self.slot.add(self.nodes, self.new_parents)


@dataclass
class DetailedWork(Work):
    """A work that needs more than the logits of the root and the nodes."""

    first_row: int = 0  # first wanted row
    queries: list[int] = field(default_factory=list)  # rows that return attention weights
    resume: Resume | None = None  # of the root and the first nodes; only the root is pending

    @property
    def root(self) -> int:
        """The row of the last pending token."""
        return max(len(self.pending) - 1, 0)

    @property
    def num_resumed(self) -> int:
        """Rows that start at `resume.layer`."""
        return 0 if self.resume is None else len(self.resume.rows)

    def keep_partial(self, num_layers: int) -> None:
        """Records rows computed in the first layers only; commits nothing."""
        self.slot.clear_scratch()
        parents = self.parents.tolist()
        self.slot.partial = PartialPass(num_layers, self.pending[-1], self.nodes, parents)


@dataclass(frozen=True)
class PassRequest:
    """Outputs that a detailed pass returns for all its works."""

    layers: tuple[int, ...] | None = None  # None: all
    taps: tuple[int, ...] = ()
    has_logits: bool = True
    has_prompt_logits: bool = False  # logits of all wanted rows; otherwise from the root on


@dataclass
class WorkRows:
    """Wanted rows of one work: hidden [w, d], taps by layer [w, d], attention by layer.

    logits: of the same rows, or from the root on; attention: [heads, queries, cells].
    """

    hidden: Tensor
    logits: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)


class Packed(NamedTuple):
    """R rows of several works, in order, in the format of the kernels; int64."""

    numbers: np.ndarray  # token ids [R], positions [R], cells [R], wanted rows [w], spans [S, 6]
    sees: np.ndarray  # bool, referenced by the spans
    logits: np.ndarray  # float32 [w, width], output buffer
    addresses: tuple[int, int]  # of numbers, of logits
    top: int  # the highest position
    wrong: int  # the first row with an invalid id, or -1


def packed(works: Many[Work], strides: tuple[int, int], num_ids: int, width: int) -> Packed:
    """Packs all rows. strides: of slots and of cells; ids are below `num_ids`.

    width: of the logits of each row from `Work.first` on; 0: no logits.
    """
    heads: list[int] = []
    ids: list[int] = []
    parents, cells, num_wanted = [], 0, 0
    for work in works:
        num, new, total = len(work.pending), len(work.nodes), len(work.parents)
        heads += work.slot.index, len(work.slot.tokens), num, new, total
        ids += work.pending
        num_wanted += new + (num > 0)
        if total:
            ids += work.nodes
            parents.append(work.parents)
            cells += (num + total) ** 2
    numbers = np.empty(4 * len(ids) + FIELDS * len(works), np.int64)
    above = parents[0] if len(parents) == 1 else np.concatenate(parents or [NO_NODES])
    sees, given = np.empty(cells, np.bool_), np.array(ids + heads)
    logits = np.empty((num_wanted if width else 0, width), np.float32)
    found = pack(given, len(ids), above, *strides, num_ids, numbers, sees, logits)
    return Packed(numbers, sees, logits, *found)


@compiled
def pack(
    given: np.ndarray,
    num_rows: int,
    parents: np.ndarray,
    slot_stride: int,
    cell_stride: int,
    num_ids: int,
    numbers: np.ndarray,
    sees: np.ndarray,
    logits: np.ndarray,
) -> tuple[tuple[int, int], int, int]:
    """Fills `numbers` and `sees` of `Packed`; returns its other fields.

    given int64: ids [num_rows], invalid if not below num_ids; then per work [S, 5]: slot,
    committed, pending and new tokens, parents.
    """
    address, heads = sees.ctypes.data, given[num_rows:].reshape((-1, 5))
    numbers[:num_rows] = given[:num_rows]
    row = num_wanted = top = at = first = 0
    for s in range(len(heads)):
        slot, base, num = heads[s, 0], heads[s, 1], heads[s, 2]
        new, total = heads[s, 3], heads[s, 4]
        count, rows = num + total, num + new
        places, own = np.empty(count, np.int64), sees[at : at + (count * count if total else 0)]
        if total:
            above = parents[first : first + total]
            lay_out(base, num, above, places, own.reshape((count, count)))
        else:
            places[:] = np.arange(base, base + num)
        for i in range(count - rows, count):
            top = max(top, places[i])
            numbers[num_rows + row] = places[i]
            numbers[2 * num_rows + row] = slot * slot_stride + (base + i) * cell_stride
            if num_wanted < len(logits) and i - (count - rows) >= num - 1:
                numbers[3 * num_rows + num_wanted] = row
                num_wanted += 1
            row += 1
        span = numbers[4 * num_rows + FIELDS * s :]
        span[0], span[1], span[2], span[3], span[4] = slot, base, base + count, rows, row - rows
        span[5] = address + at + (count - rows) * count if total else 0
        at, first = at + len(own), first + total
    wrong = -1
    for i in range(num_rows):
        if not 0 <= numbers[i] < num_ids:
            wrong = i
            break
    # faster here than `ndarray.ctypes` in Python
    return (numbers.ctypes.data, logits.ctypes.data), top, wrong


@compiled
def lay_out(base: int, num: int, parents: np.ndarray, places: np.ndarray, sees: np.ndarray) -> None:
    """Positions int64 [c] of the cells from `base` on, and their visibility, bool [c, c].

    The c cells are `num` pending tokens, which see earlier ones, and one per entry of `parents`; a
    node sees the pending tokens, its ancestors and itself.
    """
    sees[:] = False
    for cell in range(num):
        places[cell] = base + cell
        sees[cell, : cell + 1] = True
    for cell in range(num, num + len(parents)):
        above = num + parents[cell - num]  # num - 1: the root
        if above < num:
            places[cell] = base + num
            sees[cell, :num] = True
        else:
            places[cell] = places[above] + 1
            sees[cell, : above + 1] = sees[above, : above + 1]
        sees[cell, cell] = True


@cache
def warm_up() -> None:
    """Compiles the kernels, or loads them from the cache."""
    work = Work(Slot(0), [0], [0], np.array([-1], np.int32))
    packed([work], (1, 1), 1, 1)
    assert work.span.num_rows == 2
