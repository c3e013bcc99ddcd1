"""Logit memory: next-token probabilities by context, the n-gram table of STAND.

"Accelerated Test-Time Scaling with Model-Free Speculative Sampling", 2025. A context of n tokens
maps to the running mean of the target's largest probabilities after it. Means are not renormalised,
so they stay unbiased; q is. The hash table doubles up to a byte budget, then drops the least
recently used contexts.

A memory may have a fallback, shared with other memories. The fallback is used for contexts that the
memory does not know, and it learns everything that the memory learns.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from functools import cache

import numpy as np

from forerun.core.acceptance_prior import AcceptanceCounts
from forerun.core.records import Plan
from forerun.core.tree import EMPTY, Proposal, Tree, chain
from forerun.core.tree_template import Shape, grid
from forerun.errors import ConfigError
from forerun.ngrams.tables.logits import draft_dynamic, draft_template, kernels, serialize
from forerun.ngrams.tables.logits.kernels import NOTHING, Table, Temper, new_table
from forerun.ngrams.tables.logits.top_k import select_top

MAX_LOAD = 0.6  # share of used slots
FIRST_SLOTS = 1024
MAX_CONTEXT = 32  # tokens
NEUTRAL = Temper()


class LogitMemory:
    """Maps contexts of the given lengths to the mean of the `entries` largest probabilities.

    Not thread-safe: kernels use scratch arrays of the instance.
    """

    def __init__(
        self,
        *,
        context: int | Many[int] = 4,
        entries: int = 10,
        budget: int = 64 << 20,
    ) -> None:
        self.lengths = np.array(context_lengths(context), dtype=np.int64)
        if not 1 <= entries <= 256:
            raise ConfigError(f"entries must be in 1..256, got {entries}")
        self.longest = int(self.lengths[0])
        self.entries = entries
        self.slot_bytes = serialize.row_bytes(entries)
        self.budget = budget  # bytes; a change takes effect at the next growth
        if self.slots_within(budget) < 64:
            raise ConfigError(
                f"a memory with {entries} entries per context needs at least "
                f"{64 * self.slot_bytes} bytes, got {budget}; raise the budget"
            )
        self.table = new_table(min(FIRST_SLOTS, self.slots_within(budget)), entries)
        self.acceptance = {drawn: AcceptanceCounts(drawn=drawn) for drawn in (True, False)}
        self.fallback: LogitMemory | None = None
        self.clock = 0  # one tick per update
        self.evicted = 0  # contexts dropped so far
        self.observed = 0  # distributions learned so far
        self._size = 0
        self._nodes, self._grow_space = 0, draft_dynamic.new_workspace(0, entries, self.longest)

    def __len__(self) -> int:
        """Number of contexts."""
        return self._size

    @property
    def tables(self) -> tuple[Table, Table]:
        """The tables of the memory and of its fallback."""
        return self.table, NOTHING if self.fallback is None else self.fallback.table

    @property
    def nbytes(self) -> int:
        """Bytes of the table, without the fallback."""
        return len(self.table.keys) * self.slot_bytes

    def set_fallback(self, fallback: LogitMemory) -> None:
        """Sets the fallback, a memory with the same lengths and entries.

        Both share the acceptance counts of the fallback.
        """
        self.fallback, self.clock = fallback, fallback.clock
        self.acceptance = fallback.acceptance

    def slots_within(self, budget: int) -> int:
        """Number of slots in `budget` bytes."""
        return max(0, budget) // self.slot_bytes

    def context(self, tokens: Many[int]) -> np.ndarray:
        """The last tokens, most recent first, padded with -1. int32 [longest]."""
        tail = tokens[: -self.longest - 1 : -1]
        return np.array([*tail, *[-1] * (self.longest - len(tail))], dtype=np.int32)

    def lookup(self, tokens: Many[int], temper: Temper = NEUTRAL) -> Proposal | None:
        """q after `tokens`, of the longest known context; None if no length is known."""
        ids, probs = np.empty(self.entries, np.int32), np.empty(self.entries)
        context, hashes = self.context(tokens), np.empty(self.longest, np.uint64)
        size, level = kernels.look_up(
            *self.tables, self.lengths, self.clock, context, temper, hashes, ids, probs, 0
        )
        return Proposal(ids[:size], probs[:size], level) if size else None

    def draft(
        self,
        tokens: Many[int],
        shape: Shape,
        depth: int,
        temper: Temper = NEUTRAL,
        uniforms: np.ndarray | None = None,
    ) -> tuple[Tree, int]:
        """A template tree below `tokens`: see `draft_template.draft`.

        Returns the tree and the number of uniforms used, at most `entries` per place with children.
        """
        root = self.context(tokens)
        return draft_template.draft(
            *self.tables, self.lengths, self.clock, root, shape, depth, temper, uniforms
        )

    def grow(
        self,
        tokens: Many[int],
        plan: Plan,
        temper: Temper = NEUTRAL,
        uniforms: np.ndarray | None = None,
    ) -> tuple[Tree, int]:
        """A tree grown best first, and the number of uniforms used: see `draft_dynamic.grow`."""
        root, acceptance = self.context(tokens), self.acceptance[uniforms is not None]
        if plan.nodes > self._nodes:
            self._nodes = plan.nodes
            self._grow_space = draft_dynamic.new_workspace(plan.nodes, self.entries, self.longest)
        return draft_dynamic.grow(
            *self.tables,
            self.lengths,
            self.clock,
            root,
            plan,
            temper,
            acceptance,
            uniforms,
            self._grow_space,
        )

    def update(self, tokens: Many[int], ids: Many[int], probs: Many[float]) -> None:
        """Learns one distribution after `tokens`: its largest probabilities, in any order."""
        top_ids = np.zeros((1, self.entries), np.int32)
        top_probs = np.zeros((1, self.entries), np.float32)
        order = np.lexsort((np.asarray(ids), -np.asarray(probs)))[: self.entries]
        top_ids[0, : len(order)] = np.asarray(ids)[order]
        top_probs[0, : len(order)] = np.asarray(probs)[order]
        self.learn(self.context(tokens), EMPTY, np.array([-1], np.int32), top_ids, top_probs)

    def learn(
        self,
        root: np.ndarray,
        tree: Tree,
        nodes: np.ndarray,
        top_ids: np.ndarray,
        top_probs: np.ndarray,
        *,
        shares: bool = True,
    ) -> None:
        """Learns the top probabilities [n, K] at `nodes` int32 [n] of a tree below context `root`.

        Each row adds one observation to every context length. shares: the fallback learns it too.
        """
        if self.fallback is not None and shares:
            self.fallback.learn(root, tree, nodes, top_ids, top_probs)
        self._tick(len(nodes))
        for start, stop in self._parts(len(nodes)):
            self._size += kernels.learn(
                self.table[:],
                self.lengths,
                self.clock,
                root,
                tree.tokens,
                tree.parents,
                nodes[start:stop],
                top_ids[start:stop],
                top_probs[start:stop],
            )

    def follow(
        self, tokens: list[int], before: int, top_ids: np.ndarray, top_probs: np.ndarray
    ) -> None:
        """`learn` of rows [n, K], n >= 1, after tokens[:before], tokens[: before + 1] and so on."""
        num = len(top_ids)
        root = self.context(tokens[max(0, before - self.longest) : before])
        nodes = np.arange(-1, num - 1, dtype=np.int32)
        self.learn(root, chain(tokens[before : before + num - 1]), nodes, top_ids, top_probs)

    def _tick(self, num: int) -> None:
        """Advances the clock for `num` distributions; a memory uses the clock of its fallback."""
        self.clock = self.clock + 1 if self.fallback is None else self.fallback.clock
        self.observed += num

    def _parts(self, num: int) -> Iterator[tuple[int, int]]:
        """Ranges [start, stop) of `num` rows; the table has room for each when it is yielded."""
        part, lengths = max(1, num), len(self.lengths)
        if self.growth(num * lengths):
            slots = max(len(self.table.keys), self.slots_within(self.budget))
            part = max(1, slots // (8 * lengths))
        for start in range(0, num, part):
            stop = min(start + part, num)
            self._make_room((stop - start) * lengths)
            yield start, stop

    def rows(self) -> Table:
        """All contexts, packed: sorted by key, with stamps in the order of use."""
        return serialize.pack(self.table)

    def load_rows(self, rows: Table, observed: int = 0) -> None:
        """Replaces the content by packed rows, learned from `observed` distributions.

        Rows beyond the budget are dropped, least recently used first.
        """
        kept = serialize.newest(rows, int(MAX_LOAD * self.slots_within(self.budget)))
        slots = min(FIRST_SLOTS, self.slots_within(self.budget))
        while len(kept.keys) > MAX_LOAD * slots:
            slots = min(2 * slots, self.slots_within(self.budget))
        self.table = new_table(slots, self.entries)
        kernels.rehash(kept, self.table)
        self.clock, self._size = int(kept.stamps.max(initial=0)), len(kept.keys)
        self.evicted, self.observed = len(rows.keys) - len(kept.keys), observed

    def growth(self, num_new: int) -> int:
        """Bytes the table must grow by for `num_new` more contexts."""
        slots = len(self.table.keys)
        if self._size + num_new <= MAX_LOAD * slots:
            return 0
        while self._size + num_new > MAX_LOAD * slots:
            slots *= 2
        return slots * self.slot_bytes - self.nbytes

    def enlarge(self, num_new: int) -> None:
        """Grows the table for `num_new` more contexts, within the budget."""
        slots = min(self.growth(num_new) + self.nbytes, self.budget) // self.slot_bytes
        if slots > len(self.table.keys):
            larger = new_table(slots, self.entries)
            kernels.rehash(self.table, larger)
            self.table = larger

    def _make_room(self, num_new: int) -> None:
        if not self.growth(num_new):
            return
        self.enlarge(num_new)
        excess = self._size + num_new - int(MAX_LOAD * len(self.table.keys))
        if excess > 0:
            self._evict(max(excess, self._size // 4))

    def _evict(self, count: int) -> None:
        """Drops the `count` least recently used contexts."""
        stamps = np.sort(self.table.stamps[self.table.keys != 0])
        if count >= len(stamps):
            self.evicted, self._size = self.evicted + self._size, 0
            self.table = new_table(len(self.table.keys), self.entries)
            return
        cut = int(stamps[count - 1])
        ties = count - int(np.searchsorted(stamps, cut))
        dropped = kernels.evict(self.table, cut, ties)
        self.evicted, self._size = self.evicted + dropped, self._size - dropped


def context_lengths(context: int | Many[int]) -> tuple[int, ...]:
    """The lengths, longest first: 4 gives (4, 3, 2, 1)."""
    lengths = range(1, min(context, MAX_CONTEXT + 1) + 1) if isinstance(context, int) else context
    found = tuple(sorted(set(lengths), reverse=True))
    if not found or not all(isinstance(n, int) and 1 <= n <= MAX_CONTEXT for n in found):
        raise ConfigError(
            f"context must be a length or lengths in 1..{MAX_CONTEXT}, got {context!r}"
        )
    return found


@cache
def warm_up() -> None:
    """Compiles the kernels of the memory, or loads them from the cache."""
    memory = LogitMemory(entries=2)
    for dtype in (np.float32, np.float64):
        ids, probs = np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32)
        select_top(np.array([0.25, 0.75], dtype), ids[0], probs[0])
    root = memory.context([1, 2])
    memory.learn(root, EMPTY, np.array([-1], np.int32), ids, probs)
    memory.lookup([1, 2])
    memory.draft([1, 2], grid(1).first(1), 1, uniforms=np.full(2, 0.5))
    tree, _ = memory.grow([1, 2], Plan(1, 1), NEUTRAL, np.full(2, 0.5))
    memory.acceptance[True].learn(tree.parents, tree.cells_of(""), [])
    for rows in (memory.table, memory.rows()):  # two array layouts
        kernels.rehash(rows, new_table(64, 2))
    kernels.evict(memory.table, 1, 1)
