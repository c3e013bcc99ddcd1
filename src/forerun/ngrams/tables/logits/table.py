"""A memory of next-token probabilities by context: the n-gram table of STAND.

"Accelerated Test-Time Scaling with Model-Free Speculative Sampling", 2025: a context of n tokens
maps to the running mean of the target's own largest probabilities after it, not renormalised, so
that averages stay unbiased; they are renormalised when q is asked for. Flat arrays, about 100 bytes
a slot; grows by doubling up to a byte budget, then drops what has not been hit for longest.

A memory may have another behind it, which knows what others taught too: at each length it is asked
where the first knows nothing, and it learns what the first learns.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from functools import cache

import numpy as np

from forerun.core.acceptance_prior import AcceptanceCounts
from forerun.core.records import Plan
from forerun.core.tree import EMPTY, Proposal, Tree
from forerun.core.tree_template import Shape, grid
from forerun.errors import ConfigError
from forerun.ngrams.tables.logits import draft_dynamic, draft_template, kernels, serialize
from forerun.ngrams.tables.logits import update as following
from forerun.ngrams.tables.logits.kernels import NOTHING, Table, Temper, new_table
from forerun.ngrams.tables.logits.top_k import select_rows

FULLEST = 0.6  # load factor
FIRST_SLOTS = 1024
LONGEST = 32  # context
NEUTRAL = Temper()


class LogitMemory:
    """Contexts of the given lengths -> running mean of the `entries` largest probabilities.

    One instance serves one thread at a time: its kernels work in room of its own.
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
        self.slot_bytes = serialize.row_bytes(entries)  # key, count, stamp, ids, probabilities
        self.budget = budget  # bytes; may be changed at any time, takes effect at the next growth
        if self.slots_within(budget) < 64:
            raise ConfigError(
                f"a memory of {entries} entries needs at least {64 * self.slot_bytes} bytes, got "
                f"{budget}; raise the budget"
            )
        self.table = new_table(min(FIRST_SLOTS, self.slots_within(budget)), entries)
        self.chances = {drawn: AcceptanceCounts(drawn=drawn) for drawn in (True, False)}
        self.behind: LogitMemory | None = None
        self.clock = 0  # one tick per update
        self.evicted = 0  # contexts dropped so far
        self.observed = 0  # distributions learned so far
        self._size = 0
        # room to work in: to follow a text whose laws are so wide, to grow trees of so many nodes
        self._vocab, self._to_follow = 0, following.new_room(self.longest, entries, 0)
        self._nodes, self._to_grow = 0, draft_dynamic.new_room(0, entries, self.longest)

    def __len__(self) -> int:
        """Contexts held."""
        return self._size

    @property
    def tables(self) -> tuple[Table, Table]:
        """Its own table and that of the memory behind it."""
        return self.table, NOTHING if self.behind is None else self.behind.table

    @property
    def nbytes(self) -> int:
        """Bytes held, by what is behind not counted."""
        return len(self.table.keys) * self.slot_bytes

    def lean_on(self, behind: LogitMemory) -> None:
        """Asks a memory of the same lengths and entries for what it does not know itself.

        What is learned of drafts is common to both from now on.
        """
        self.behind, self.clock = behind, behind.clock
        self.chances = behind.chances

    def slots_within(self, budget: int) -> int:
        """How many slots fit into `budget` bytes."""
        return max(0, budget) // self.slot_bytes

    def context(self, tokens: Many[int]) -> np.ndarray:
        """The last tokens, most recent first, padded with -1. int32 [longest]."""
        tail = tokens[: -self.longest - 1 : -1]
        return np.array([*tail, *[-1] * (self.longest - len(tail))], dtype=np.int32)

    def lookup(self, tokens: Many[int], temper: Temper = NEUTRAL) -> Proposal | None:
        """q after `tokens`: the longest known context wins; None if no length is known."""
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
        """A tree below `tokens`, drawn without replacement or, without uniforms, of best tokens.

        Returns it with the number of uniforms used, at most `entries` per place with children.
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
        """A tree of the most promising places, and how many uniforms it took (see growing)."""
        root, chances = self.context(tokens), self.chances[uniforms is not None]
        if plan.nodes > self._nodes:
            self._nodes = plan.nodes
            self._to_grow = draft_dynamic.new_room(plan.nodes, self.entries, self.longest)
        return draft_dynamic.grow(
            *self.tables,
            self.lengths,
            self.clock,
            root,
            plan,
            temper,
            chances,
            uniforms,
            self._to_grow,
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
    ) -> None:
        """Learns the top probabilities [n, K] at `nodes` int32 [n] of a tree below context `root`.

        Each row adds one observation to every context length.
        """
        if self.behind is not None:
            self.behind.learn(root, tree, nodes, top_ids, top_probs)
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

    def follow(self, tokens: list[int], before: int, laws: np.ndarray) -> None:
        """Learns laws [n, V] that came after tokens[:before], tokens[: before + 1] and so on.

        As `learn` would learn the largest of each, in a kernel that finds them as well.
        """
        if self.behind is not None:
            self.behind.follow(tokens, before, laws)
        num, vocab = len(laws), laws.shape[1]
        above = tokens[max(0, before - self.longest) : before + num - 1]
        if before < self.longest:
            above = [-1] * (self.longest - before) + above
        text = np.array(above, np.int32)
        if vocab != self._vocab:
            self._vocab = vocab
            self._to_follow = following.new_room(self.longest, self.entries, vocab)
        self._tick(num)
        if not self.growth(num * len(self.lengths)):
            self._average(text, laws)
            return
        for start, stop in self._parts(num):
            self._average(text[start : stop + self.longest - 1], laws[start:stop])

    def _average(self, text: np.ndarray, laws: np.ndarray) -> None:
        self._size += following.follow(
            *self.table, self.lengths, self.clock, text, laws, self._to_follow
        )

    def _tick(self, num: int) -> None:
        """So many laws are learned at once; what is behind has them already, and its time holds."""
        self.clock = self.clock + 1 if self.behind is None else self.behind.clock
        self.observed += num

    def _parts(self, num: int) -> Iterator[tuple[int, int]]:
        """So many rows, in parts that there is room for, once each is asked for."""
        at_once, lengths = max(1, num), len(self.lengths)
        if self.growth(num * lengths):
            most = max(len(self.table.keys), self.slots_within(self.budget))
            at_once = max(1, most // (8 * lengths))
        for start in range(0, num, at_once):
            stop = min(start + at_once, num)
            self._make_room((stop - start) * lengths)
            yield start, stop

    def rows(self) -> Table:
        """All that is known, packed: contexts by key, stamps in the order of their last hit."""
        return serialize.pack(self.table)

    def hold(self, rows: Table, observed: int = 0) -> None:
        """Holds packed rows, learned from `observed` distributions, and nothing else.

        Those that the budget has no room for are left out, the least recently hit first.
        """
        kept = serialize.newest(rows, int(FULLEST * self.slots_within(self.budget)))
        slots = min(FIRST_SLOTS, self.slots_within(self.budget))
        while len(kept.keys) > FULLEST * slots:
            slots = min(2 * slots, self.slots_within(self.budget))
        self.table = new_table(slots, self.entries)
        kernels.rehash(kept, self.table)
        self.clock, self._size = int(kept.stamps.max(initial=0)), len(kept.keys)
        self.evicted, self.observed = len(rows.keys) - len(kept.keys), observed

    def growth(self, num_new: int) -> int:
        """Bytes by which the table would like to grow to take `num_new` more contexts."""
        slots = len(self.table.keys)
        if self._size + num_new <= FULLEST * slots:
            return 0
        while self._size + num_new > FULLEST * slots:
            slots *= 2
        return slots * self.slot_bytes - self.nbytes

    def enlarge(self, num_new: int) -> None:
        """Grows for `num_new` more contexts, as far as the budget lets it."""
        slots = min(self.growth(num_new) + self.nbytes, self.budget) // self.slot_bytes
        if slots > len(self.table.keys):
            larger = new_table(slots, self.entries)
            kernels.rehash(self.table, larger)
            self.table = larger

    def _make_room(self, num_new: int) -> None:
        if not self.growth(num_new):
            return
        self.enlarge(num_new)
        excess = self._size + num_new - int(FULLEST * len(self.table.keys))
        if excess > 0:
            self._evict(max(excess, self._size // 4))

    def _evict(self, count: int) -> None:
        """Drops the `count` contexts that were hit least recently."""
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
    """4 -> (4, 3, 2, 1); a sequence of lengths -> the same, longest first."""
    lengths = range(1, min(context, LONGEST + 1) + 1) if isinstance(context, int) else context
    found = tuple(sorted(set(lengths), reverse=True))
    if not found or not all(isinstance(n, int) and 1 <= n <= LONGEST for n in found):
        raise ConfigError(f"context must be a length or lengths in 1..{LONGEST}, got {context!r}")
    return found


@cache
def warm_up() -> None:
    """Compiles every kernel of the memory, or loads it from the cache."""
    memory = LogitMemory(entries=2)
    for dtype in (np.float32, np.float64):
        ids, probs = np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32)
        laws = np.array([[0.25, 0.75]], dtype)
        select_rows(laws, ids, probs)
        memory.follow([1, 2], 2, laws)
    root = memory.context([1, 2])
    memory.learn(root, EMPTY, np.array([-1], np.int32), ids, probs)
    memory.lookup([1, 2])
    memory.draft([1, 2], grid(1).first(1), 1, uniforms=np.full(2, 0.5))
    tree, _ = memory.grow([1, 2], Plan(1, 1), NEUTRAL, np.full(2, 0.5))
    memory.chances[True].learn(tree.parents, tree.cells_of(""), [])
    for rows in (memory.table, memory.rows()):  # of a table, and of a file
        kernels.rehash(rows, new_table(64, 2))
    kernels.evict(memory.table, 1, 1)
