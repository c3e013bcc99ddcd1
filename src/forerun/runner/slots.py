"""Slots of the KV cache: their tokens, and the sequences that use them.

A slot has committed cells (cell i is position i unless it has explicit positions) and after them
scratch cells, the tree nodes of the last pass. `sync` compares both with a sequence's tokens, keeps
what agrees and moves accepted nodes into place, so nothing is rolled back. A free slot keeps its
tokens until it is reused; a new sequence reuses the longest prefix in any slot of its tenant.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Self
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np
import torch

from forerun.core.records import Sequence
from forerun.errors import CapacityError

RECHECKED_TOKENS = 64  # last tokens to compare again in a list that was synced before
MIN_REUSE_TOKENS = 64  # a free slot with fewer tokens is overwritten first
MAX_KEPT_SLOTS = 4  # free slots kept for the next turn of their conversations


@dataclass(frozen=True)
class PartialPass:
    """Cells of a pass over the first layers only: the root and some nodes."""

    num_layers: int  # layers 0 .. num_layers - 1 have these cells
    root: int  # token
    nodes: list[int]  # tokens
    parents: list[int]


@dataclass
class Slot:
    """State of one slot of the cache."""

    index: int
    tokens: list[int] = field(default_factory=list)  # committed: cell i is tokens[i]
    nodes: list[int] = field(default_factory=list)  # scratch: cell len(tokens) + j is nodes[j]
    parents: list[int] = field(default_factory=list)  # of scratch nodes; -1: the last committed
    where: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> node
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # of node (-1: root), if kept
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # hidden rows, likewise
    positions: np.ndarray | None = None  # int64, of its first cells; None: cell i is position i
    dropped: np.ndarray | None = None  # bool [layers, kv_heads, n]: of its first cells, hidden ones
    partial: PartialPass | None = None  # after the committed cells, in place of scratch
    owner: ref[Sequence] | None = None
    tenant: str = ""  # `Sequence.cells_owner` of the cells
    synced: list[int] | None = None  # the list that `tokens` last agreed with
    used: int = 0  # time of the last pass

    @property
    def is_free(self) -> bool:
        return self.owner is None or self.owner() is None

    @property
    def is_altered(self) -> bool:
        """Whether cells have explicit positions, or some are hidden."""
        return self.positions is not None or self.dropped is not None

    def places(self, start: int, stop: int) -> np.ndarray:
        """Positions of the cells [start, stop), int64; after explicit ones they rise by one."""
        cells = np.arange(start, stop)
        given = self.positions
        if given is None or not len(given):
            return cells
        last = len(given) - 1
        return given[np.minimum(cells, last)] + np.maximum(cells - last, 0)

    def set_positions(self, positions: np.ndarray) -> None:
        """Sets positions of cells, int64 [n]; drops committed cells with other positions."""
        held = len(self.tokens)
        before = self.places(0, held)
        is_usual = np.array_equal(positions, np.arange(len(positions)))
        self.positions = None if is_usual else positions
        differ = np.flatnonzero(before != self.places(0, held))
        if len(differ):
            self.truncate(int(differ[0]))

    def restore(self) -> None:
        """Drops altered cells, so that any sequence may use the slot."""
        if self.is_altered:
            self.truncate(0)
            self.positions = self.dropped = None

    def agreed(self, tokens: list[int]) -> int:
        """Length of the common prefix of the slot's tokens and `tokens`.

        Law: a synced list only grows, or loses at most its last RECHECKED_TOKENS tokens before it
        grows again; any other change is a new list, which is compared in full.
        """
        num = len(self.tokens)
        low = max(num - RECHECKED_TOKENS, 0)
        if tokens is self.synced and self.tokens[low:] == tokens[low:num]:
            return num
        return common_prefix(self.tokens, tokens)

    def add(self, nodes: list[int], parents: list[int]) -> None:
        """Appends scratch nodes. Of equal siblings the last one is used."""
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
        """Scratch nodes along the longest prefix of `tokens`, from the root down."""
        found, node = [], -1
        for token in tokens:
            node = self.where.get((node, token), -2)
            if node < 0:
                break
            found.append(node)
        return found


class Slots(ABC):
    """Assignment of slots to sequences and tokens; subclasses store the cells.

    can_move: cells of scratch nodes stay valid after their pass, so accepted nodes are moved.
    """

    can_move = True

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.slots: list[Slot] = []
        self._of: WeakKeyDictionary[Sequence, Slot] = WeakKeyDictionary()
        self._guests: WeakSet[Sequence] = WeakSet()  # sequences without a slot, which may need one
        self.reused: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # number of tokens
        self._clock = 0

    @abstractmethod
    def empty(self) -> Self:
        """An empty cache of the same kind."""

    @abstractmethod
    def move(self, slot: Slot, source: list[int], start: int) -> None:
        """Copies the cells `source` to the cells from `start` on."""

    @abstractmethod
    def copy(self, slot: Slot, other: Slot, length: int) -> None:
        """Copies the first `length` cells of another slot."""

    def has_cells(self, slot: Slot) -> bool:
        """Whether the slot has cells; memory may have been full."""
        return True

    def check_room(self, slots: int, cells: int, taken: int = 0) -> int:
        """Bytes that this number of slots and cells needs in addition to the current ones.

        taken: bytes that others will use. Raises CapacityError if there are too many slots, or they
        do not fit.
        """
        if slots > self.max_slots:
            raise CapacityError(
                f"max_seqs is {self.max_slots}, and {slots} sequences were requested; load the "
                "model with a larger max_seqs, or use a smaller batch"
            )
        return 0

    def can_keep_more(self) -> bool:
        """Whether memory allows another slot, so that an idle conversation keeps its own."""
        return False

    def sync(self, seq: Sequence) -> Slot:
        """The slot of `seq`, after dropping cells that do not agree with seq.tokens.

        Tokens of matching scratch nodes are committed, except the last one: its row is computed.
        """
        slot = self._of.get(seq)
        if slot is None:
            slot = self._acquire(seq)
        self._clock += 1
        slot.used = self._clock
        held, tokens = len(slot.tokens), seq.tokens
        agreed = slot.agreed(tokens)
        if agreed < held:
            slot.truncate(min(agreed, len(tokens) - 1))
        elif held < len(tokens):
            self._follow(slot, tokens)
        slot.synced = tokens
        return slot

    def holds(self, seq: Sequence) -> bool:
        """Whether the sequence has a slot."""
        return seq in self._of

    @property
    def num_held(self) -> int:
        """Number of sequences that have a slot, or use the rows of one that has."""
        return sum(not slot.is_free for slot in self.slots) + len(self._guests)

    def is_altered(self, seq: Sequence) -> bool:
        """Whether the sequence has cells with explicit positions, or hidden cells."""
        slot = self._of.get(seq)
        return slot is not None and slot.is_altered

    def follow(self, seq: Sequence) -> None:
        """Records that the sequence used the rows of another one and has no slot yet."""
        self._guests.add(seq)
        self.reused.setdefault(seq, len(seq.tokens) - 1)

    def known(self, seq: Sequence) -> int:
        """Number of tokens in the sequence's own slot."""
        slot = self._of.get(seq)
        return 0 if slot is None else min(len(slot.tokens), len(seq.tokens))

    def release(self, seq: Sequence) -> None:
        """Frees the slot; its cells stay until it is reused."""
        self._guests.discard(seq)
        slot = self._of.pop(seq, None)
        if slot is not None:
            slot.owner = slot.synced = None
            slot.restore()

    def invalidate(self) -> None:
        """Drops all cells after a weight update. Sequences keep their slots."""
        for slot in self.slots:
            slot.truncate(0)
            slot.dropped = slot.synced = None

    def _follow(self, slot: Slot, tokens: list[int]) -> None:
        """Commits the scratch nodes along the new tokens; moves their cells into place."""
        start = len(slot.tokens)
        path = slot.walk(tokens[start:-1]) if slot.nodes and self.can_move else []
        partial = slot.partial if len(tokens) == start + 1 else None  # its root is still last
        slot.clear_scratch()  # before the move: an interrupted move must not be repeated
        source, stop = [start + node for node in path], start + len(path)
        if source != list(range(start, stop)):
            self.move(slot, source, start)
        slot.tokens += tokens[start:stop]
        slot.partial = partial

    def _acquire(self, seq: Sequence) -> Slot:
        found = [(self._shared(s, seq), s.is_free, -s.used, s) for s in self.slots]
        shared, _, _, best = max(found, key=lambda f: f[:3], default=(0, False, 0, None))
        slot = self._choose(best if shared else None, shared, len(seq.tokens))
        slot.restore()
        slot.clear_scratch()
        slot.synced = None
        if best is not None and slot is not best and shared:
            self.copy(slot, best, shared)
            slot.tokens = best.tokens[:shared]
        slot.truncate(shared)
        slot.owner, slot.tenant = ref(seq), seq.cells_owner
        self._of[seq] = slot
        self._guests.discard(seq)
        self.reused.setdefault(seq, shared)
        return slot

    def _shared(self, slot: Slot, seq: Sequence) -> int:
        """Cells of a slot that a new sequence may reuse: those of the same tenant only."""
        if slot.is_altered or slot.tenant != seq.cells_owner:
            return 0
        return common_prefix(slot.tokens, seq.tokens)

    def _choose(self, best: Slot | None, shared: int, wanted: int) -> Slot:
        """A slot for a new sequence of `wanted` tokens; `best` has the first `shared` of them.

        Order: a free slot that loses little, `best` first; a new slot, if memory and MAX_KEPT_SLOTS
        allow; the least recently used free slot. Slots of at least MIN_REUSE_TOKENS tokens are
        kept for their conversations.
        """
        lost = len(best.tokens) - shared if best is not None else 0
        # another sample of the same prompt, or the same turn again: the rest is not needed
        is_again = shared >= wanted - 1
        if best is not None and best.is_free and (is_again or lost < MIN_REUSE_TOKENS):
            return best
        free = [slot for slot in self.slots if slot.is_free]
        cheap = [
            slot for slot in free if len(slot.tokens) < MIN_REUSE_TOKENS and self.has_cells(slot)
        ]
        keeps = not cheap and len(free) < MAX_KEPT_SLOTS and self.can_keep_more()
        if (keeps or not free) and len(self.slots) < self.max_slots:
            self.slots.append(Slot(len(self.slots)))
            return self.slots[-1]
        if free:  # slots without tokens may have no cells yet, and memory may be full
            return min(cheap or free, key=lambda s: (not s.tokens, s.used))
        raise CapacityError(
            f"max_seqs is {self.max_slots}, and one more sequence came; load the model with a "
            "larger max_seqs, or use a smaller batch"
        )


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
