"""What steps teach logit memories: all laws of a batch, learned in one kernel call a memory.

Every memory ends bit for bit as if its lessons had come one by one (`LogitMemory.learn`): their
order, their stamps, and when it grows or evicts are the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import chain

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
        self._num = 0
        self._places: list[int] = []  # see kernels.Lessons
        self._nodes: list[int] = []  # by row
        self._laws: list[Many[np.ndarray] | np.ndarray] = []  # by lesson and row, [V] each
        self._raw: list[bool] = []  # by lesson: logits, whose softmax is the law
        self._tokens: list[int] = []  # of all trees
        self._parents: list[int] = []
        self._takers: dict[LogitMemory, int] = {}  # memories, numbered; what is behind goes first

    def add(
        self,
        memory: LogitMemory,
        tokens: list[int],
        before: int,
        tree: Tree,
        nodes: Many[int],
        laws: Many[np.ndarray] | np.ndarray,
        *,
        is_raw: bool,
    ) -> None:
        """A lesson: laws [V] (logits, where `is_raw`) at nodes below the first `before` tokens."""
        assert len(laws) == len(nodes), "a law for every node"
        row, node, takers = len(self._nodes), len(self._tokens), self._takers
        self._nodes.extend(nodes)
        self._laws.append(laws)
        self._raw.append(is_raw)
        if len(tree):
            self._tokens += tree.tokens.tolist()
            self._parents += tree.parents.tolist()
        far = -1 if memory.behind is None else takers.setdefault(memory.behind, len(takers))
        near = takers.setdefault(memory, len(takers))
        above = tokens[max(0, before - memory.longest) : before]
        above.reverse()
        above += [-1] * (memory.longest - len(above))
        self._places += (row, len(self._nodes), node, len(self._tokens), near, far, 0, *above)
        self._num += 1

    def teach(self) -> None:
        """Every memory learns its lessons; one that is behind others goes first and stamps them."""
        num, is_once = self._num, self._is_once
        if not num:
            return
        script = np.array(self._places + self._nodes + self._tokens + self._parents, np.int32)
        lessons = kernels.Lessons(script, num, *self._top(self._memories.entries))
        for memory, who in self._takers.items():
            at = memory.take(lessons, who, 0, is_once=is_once)
            while at < num:
                width = len(self._places) // num
                start, end = self._places[at * width : at * width + 2]
                self._memories.enlarge(memory, (end - start) * len(memory.lengths))
                memory.take_one(lessons, at, is_once=is_once)
                at = memory.take(lessons, who, at + 1, is_once=is_once)

    def _top(self, entries: int) -> tuple[np.ndarray, np.ndarray]:
        """The largest probabilities of every law: ids and probabilities [R, K]."""
        ids = np.empty((len(self._nodes), entries), np.int32)
        probs = np.empty((len(self._nodes), entries), np.float32)
        lesson = at = 0
        while lesson < self._num:
            first, is_raw, rows = lesson, self._raw[lesson], self._laws[lesson]
            lesson, stop = lesson + 1, at + len(rows)
            if not is_raw and isinstance(rows, np.ndarray):  # read where they lie
                select_rows(rows, ids[at:stop], probs[at:stop])
            else:
                while lesson < self._num and self._raw[lesson] == is_raw:
                    lesson += 1
                several = list(chain.from_iterable(self._laws[first:lesson]))
                stop = at + len(several)
                _select_copies(several, ids[at:stop], probs[at:stop], is_raw=is_raw)
            at = stop
        return ids, probs


def _select_copies(
    laws: list[np.ndarray], ids: np.ndarray, probs: np.ndarray, *, is_raw: bool
) -> None:
    """`select_rows` of laws [V] that lie apart, or of the softmax of logits; ids, probs [n, K]."""
    most = max(1, BLOCK // len(laws[0]))
    for start in range(0, len(laws), most):
        rows = laws[start : start + most]
        whole = np.concatenate(rows) if len(rows) > 1 or is_raw else rows[0]
        block = whole.reshape(len(rows), -1)
        if is_raw:  # as `sampling.softmax` does, bit for bit
            block -= np.maximum.reduce(block, 1, keepdims=True)
            np.exp(block, out=block)
            block /= np.add.reduce(block, 1, keepdims=True)
        stop = start + len(rows)
        select_rows(block, ids[start:stop], probs[start:stop])
