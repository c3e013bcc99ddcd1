"""Key-value cells of all sequences in one tensor. State follows tokens: a slot knows what it holds.

A slot holds committed cells (cell i is position i) and behind them scratch cells: the tree nodes of
the last pass. `sync` compares both with a sequence's tokens, keeps what agrees and moves accepted
nodes into place, so nothing is ever rolled back. A free slot keeps its tokens until it is reused,
and a new sequence takes over the longest prefix that any slot holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

import torch

from forerun.errors import CapacityError
from forerun.records import Sequence


@dataclass
class Slot:
    """What one row of the cache holds."""

    index: int
    tokens: list[int] = field(default_factory=list)  # committed: cell i holds tokens[i]
    nodes: list[int] = field(default_factory=list)  # scratch tokens: node j is in cell base + j
    parents: list[int] = field(default_factory=list)  # of scratch nodes; -1: the last committed
    base: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # of node (-1: root), if kept
    owner: ref[Sequence] | None = None
    used: int = 0  # time of the last pass

    @property
    def is_free(self) -> bool:
        return self.owner is None or self.owner() is None

    def truncate(self, length: int) -> None:
        """Keeps `length` committed tokens and no scratch."""
        del self.tokens[length:]
        self.clear_scratch()

    def clear_scratch(self) -> None:
        self.nodes, self.parents, self.base = [], [], len(self.tokens)
        self.logits = {}

    def walk(self, tokens: list[int]) -> list[int]:
        """Scratch nodes that spell the longest beginning of `tokens`, from the top down."""
        # among equal siblings the last one computed counts
        where = {key: j for j, key in enumerate(zip(self.parents, self.nodes, strict=True))}
        found, node = [], -1
        for token in tokens:
            node = where.get((node, token), -2)
            if node < 0:
                break
            found.append(node)
        return found


class Slots:
    """Which slot belongs to which sequence, and which tokens it holds; the cells are a subclass's.

    can_move: cells of scratch nodes outlive their pass, so accepted nodes need no second one.
    """

    can_move = True

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.slots: list[Slot] = []
        self._of: WeakKeyDictionary[Sequence, Slot] = WeakKeyDictionary()
        self._clock = 0

    def move(self, slot: Slot, source: list[int], start: int) -> None:
        """Copies the cells `source` to the cells from `start` on."""
        raise NotImplementedError

    def copy(self, slot: Slot, other: Slot, length: int) -> None:
        """Copies the first `length` cells of another slot."""
        raise NotImplementedError

    def sync(self, seq: Sequence) -> Slot:
        """The slot of `seq`, with everything it holds agreeing with seq.tokens.

        Tokens that scratch nodes spell are committed, all but the last one, whose row is wanted.
        """
        slot = self._of.get(seq)
        if slot is None:
            slot = self._acquire(seq)
        self._clock += 1
        slot.used = self._clock
        held, tokens = slot.tokens, seq.tokens
        if len(held) < len(tokens) and held == tokens[: len(held)]:
            self._follow(slot, tokens)
        elif held != tokens:
            slot.truncate(min(common_prefix(held, tokens), len(tokens) - 1))
        return slot

    def release(self, seq: Sequence) -> None:
        """Frees the slot; its tokens stay until it is reused."""
        slot = self._of.pop(seq, None)
        if slot is not None:
            slot.owner = None

    def _follow(self, slot: Slot, tokens: list[int]) -> None:
        """Commits the scratch nodes that the new tokens spell, moving their cells into place."""
        start = len(slot.tokens)
        path = slot.walk(tokens[start:-1]) if slot.nodes and self.can_move else []
        if path:
            source, stop = [slot.base + node for node in path], start + len(path)
            if source != list(range(start, stop)):
                self.move(slot, source, start)
            slot.tokens += tokens[start:stop]
        slot.clear_scratch()

    def _acquire(self, seq: Sequence) -> Slot:
        best = max(self.slots, key=lambda s: common_prefix(s.tokens, seq.tokens), default=None)
        shared = common_prefix(best.tokens, seq.tokens) if best else 0
        slot = self._choose(best if shared else None)
        slot.clear_scratch()
        if best is not None and slot is not best and shared:
            self.copy(slot, best, shared)
            slot.tokens = best.tokens[:shared]
        slot.truncate(shared)
        slot.owner = ref(seq)
        self._of[seq] = slot
        return slot

    def _choose(self, best: Slot | None) -> Slot:
        """The slot with the best prefix if it is free, else a new one, else the oldest free one."""
        free = [slot for slot in self.slots if slot.is_free]
        if best in free and best is not None:
            return best
        if len(self.slots) < self.max_slots:
            self.slots.append(Slot(len(self.slots)))
            return self.slots[-1]
        if free:
            return min(free, key=lambda s: s.used)
        raise CapacityError(
            f"more than {self.max_slots} sequences run at once; load the model with a larger "
            "max_seqs, or use a smaller batch"
        )


class Cache(Slots):
    """The cells: data [layers, slots, cells, 2, kv_heads, head_dim], grown as needed."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_slots: int,
        max_cells: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(max_slots)
        self.max_cells, self.dtype, self.device = max_cells, dtype, device
        self.data = torch.zeros(
            num_layers, 0, 0, 2, num_kv_heads, head_dim, dtype=dtype, device=device
        )

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def move(self, slot: Slot, source: list[int], start: int) -> None:
        cells = self.data[:, slot.index]
        cells[:, start : start + len(source)] = cells[:, source]

    def copy(self, slot: Slot, other: Slot, length: int) -> None:
        self.reserve(slot, length)
        self.data[:, slot.index, :length] = self.data[:, other.index, :length]

    def reserve(self, slot: Slot, cells: int) -> None:
        """Makes room for `cells` cells in this slot (and all others).

        Raises CapacityError if they do not fit into memory.
        """
        _, slots, have = self.data.shape[:3]
        if slot.index < slots and cells <= have:
            return
        length, room = have, slots
        if cells > have:
            length = max(cells, min(self.max_cells, max(2 * have, 256)))
        if slot.index >= slots:
            room = min(self.max_slots, max(2 * slots, slot.index + 1))
        self._grow((self.data.shape[0], room, length, *self.data.shape[3:]))

    def _grow(self, shape: tuple[int, ...]) -> None:
        size = torch.Size(shape).numel() * self.dtype.itemsize
        free = available_bytes(self.device)
        try:
            if size > free:
                raise MemoryError
            data = torch.zeros(shape, dtype=self.dtype, device=self.device)
            data[:, : self.data.shape[1], : self.data.shape[2]] = self.data
        except (MemoryError, RuntimeError) as cause:
            raise CapacityError(
                f"the key-value cache needs {size / 2**20:.0f} MiB for {shape[1]} sequences of "
                f"{shape[2]} tokens, and {free / 2**20:.0f} MiB are free; use fewer sequences at "
                "once, shorter prompts, or a lower `context` when loading"
            ) from cause
        self.data = data


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


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62  # unknown: let the allocator say no
