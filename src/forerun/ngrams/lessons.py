"""What steps teach logit memories: all laws of a batch, learned in one kernel call a memory.

Every memory ends bit for bit as if its lessons had come one by one (`LogitMemory.learn`): their
order, their stamps, and when it grows or evicts are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many

import numpy as np

from forerun.ngrams import kernels
from forerun.ngrams.memory import LogitMemory
from forerun.ngrams.selecting import select_rows
from forerun.ngrams.sharing import Memories
from forerun.tree import Tree

BLOCK = 1 << 16  # entries of laws that are copied together; a longer law is read where it lies


class Lessons:
    """Laws at nodes of trees below texts, in the order in which memories learn them.

    is_once: a context learns from the first of the nodes of a lesson that share it.
    """

    def __init__(self, memories: Memories, *, is_once: bool) -> None:
        self._memories, self._is_once = memories, is_once
        self._places: list[int] = []  # by lesson: first row, end, first node, end, context
        self._nodes: list[int] = []  # by row
        self._laws: list[np.ndarray] = []  # by row, [V] each
        self._raw: list[bool] = []  # by row: logits, whose softmax is the law
        self._trees: list[Tree] = []
        self._size = 0  # nodes of the trees
        self._takers: dict[LogitMemory, list[int]] = {}  # lessons by memory; what is behind first

    def add(
        self,
        memory: LogitMemory,
        tokens: list[int],
        before: int,
        tree: Tree,
        nodes: Many[int],
        laws: Iterable[np.ndarray],
        *,
        is_raw: bool,
    ) -> None:
        """A lesson: laws [V] (logits, where `is_raw`) at nodes below the first `before` tokens."""
        longest, at, size = memory.longest, len(self._nodes), self._size
        self._nodes += nodes
        self._laws += laws
        end = len(self._nodes)
        self._raw += [is_raw] * (end - at)
        if len(tree):
            self._trees.append(tree)
            self._size += len(tree)
        lesson = len(self._places) // (4 + longest)
        tail = tokens[max(0, before - longest) : before]
        tail.reverse()
        padding = [-1] * (longest - len(tail))
        self._places += [at, end, size, self._size, *tail, *padding]
        if memory.behind is not None:
            self._takers.setdefault(memory.behind, []).append(lesson)
        self._takers.setdefault(memory, []).append(lesson)

    def teach(self) -> None:
        """Every memory learns its lessons; one behind others goes first and sets their clock."""
        if not self._nodes:
            return
        longest = next(iter(self._takers)).longest
        places = np.array(self._places, np.int32).reshape(-1, 4 + longest)
        laid = kernels.Lessons(
            places,
            np.array(self._nodes, np.int32),
            *self._joined(),
            *self._top(self._memories.entries),
            np.zeros(len(places), np.int32),
        )
        for memory, taken in self._takers.items():
            order = np.array(taken, np.int32)
            if memory.behind is None:
                laid.clocks[order] = np.arange(memory.clock + 1, memory.clock + 1 + len(order))
            at = 0
            while at < len(order):
                at = memory.take(laid, order, at, is_once=self._is_once)
                if at < len(order):
                    first, end = places[order[at], :2].tolist()
                    self._memories.enlarge(memory, (end - first) * len(memory.lengths))
                    memory.take_one(laid, int(order[at]), is_once=self._is_once)
                    at += 1

    def _joined(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and parents of all trees, one after another; parents count within their tree."""
        if not self._trees:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        tokens = np.concatenate([tree.tokens for tree in self._trees])
        return tokens, np.concatenate([tree.parents for tree in self._trees])

    def _top(self, entries: int) -> tuple[np.ndarray, np.ndarray]:
        """The largest probabilities of every law: ids and probabilities [R, K]."""
        ids = np.empty((len(self._laws), entries), np.int32)
        probs = np.empty((len(self._laws), entries), np.float32)
        for part in self._blocks():
            rows, is_raw = self._laws[part], self._raw[part.start]
            whole = np.concatenate(rows) if len(rows) > 1 or is_raw else rows[0]
            laws = whole.reshape(len(rows), -1)
            if is_raw:  # as `sampling.softmax` does, bit for bit
                laws -= laws.max(1, keepdims=True)
                np.exp(laws, out=laws)
                laws /= np.add.reduce(laws, 1, keepdims=True)
            select_rows(laws, ids[part], probs[part])
        return ids, probs

    def _blocks(self) -> Iterator[slice]:
        """Stretches of rows of one kind, of BLOCK entries at most or a single row."""
        most, start = max(1, BLOCK // len(self._laws[0])), 0
        for row in range(1, len(self._laws) + 1):
            is_end = row == len(self._laws) or self._raw[row] != self._raw[start]
            if is_end or row - start == most:
                yield slice(start, row)
                start = row
