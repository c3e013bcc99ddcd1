"""Lookahead decoding: parallel Jacobi iterations of the target produce n-grams for drafts.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2024. A
window of guessed tokens ahead of the text is fed to the target. The target's top tokens after them
become the next row of the window. A column of N - 1 rows and its new token is an n-gram for the
pool. The n-grams that begin with the last token are drafts. One pass does both; no second model or
datastore is needed.

The attention mask of the window is that of a tree: row 0 is a chain below the root, and the rest of
column i is a chain below its i-th token. So the window is part of the draft tree, and its tokens
may be accepted, unlike in the original.

Exact: POINT nodes made from finished steps. Needs the target's logits at the window's nodes.
"""

from __future__ import annotations

from weakref import WeakSet

import numpy as np
import torch

from forerun.core.dice import Dice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.tree import Tree, TreeBuilder
from forerun.drafters.base import PerSequence
from forerun.errors import ConfigError
from forerun.utils.device_copy import to_device


class Lookahead(PerSequence):
    """A window of `window` columns and `ngram` - 1 rows, and a pool of n-grams, per sequence.

    guesses: max n-grams drafted, and kept per first token; the latest are kept. from_prompt: also
    adds the n-grams of prompt and output to the pool. A plan of fewer nodes than
    (window + guesses) (ngram - 1) - 1 gets fewer columns and guesses, half the nodes each.
    """

    labels = frozenset({"point"})

    def __init__(
        self, *, ngram: int = 5, window: int = 7, guesses: int = 7, from_prompt: bool = False
    ) -> None:
        if ngram < 2 or window < 1 or guesses < 1:
            raise ConfigError(
                f"ngram must be at least 2, window and guesses at least 1, got {ngram=}, {window=} "
                f"and {guesses=}; the paper uses 5, 7 and 7"
            )
        self.ngram, self.window, self.guesses = ngram, window, guesses
        self.from_prompt = from_prompt
        self._seqs: WeakSet[Sequence] = WeakSet()  # sequences with a state

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        state, tree = self._state(seq), Trie()
        window_nodes = self.window * (self.ngram - 1) - 1
        max_nodes = plan.nodes - min(window_nodes, (plan.nodes + 1) // 2)
        for gram in state.pool.of(seq.tokens[-1]):
            tree.add(gram[: plan.depth], max_nodes)
        state.window.widen(self.window, plan.nodes - len(tree), plan.depth, seq.tokens)
        for path in state.window.paths():
            tree.add(path, plan.nodes)
        return tree.build()

    def observe(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            state, count = seq.scratch.get(self), len(step.emitted[i])
            if state is None or not count:
                continue
            best = best_tokens(step.trees[i], state.window.paths(), step.laws[i].rows.logits)
            for first, rest in state.window.advance(best, count):
                state.pool.add(first, rest)
            if self.from_prompt:
                state.pool.read(seq.tokens[-count - self.ngram + 1 :])
            state.length = len(seq.tokens)

    def finish(self, seq: Sequence) -> None:
        seq.scratch.pop(self, None)
        self._seqs.discard(seq)

    def memory_report(self) -> dict[str, int]:
        grams = sum(seq.scratch[self].pool.size for seq in self._seqs)
        return {"n-gram pools": grams * (160 + 8 * self.ngram)}  # bytes of a tuple and a dict slot

    def _state(self, seq: Sequence) -> State:
        """The state of a sequence; resets the window if tokens came from steps not observed."""
        if self not in seq.scratch:
            seq.scratch[self] = State(self.ngram, self.guesses)
            self._seqs.add(seq)
        state: State = seq.scratch[self]
        if missed := len(seq.tokens) - state.length:
            state.window, state.length = Window(self.ngram), len(seq.tokens)
            if self.from_prompt:
                state.pool.read(seq.tokens[-missed - self.ngram + 1 :])
        return state


class State:
    """The pool and window of one sequence."""

    def __init__(self, ngram: int, guesses: int) -> None:
        self.pool, self.window = Pool(ngram, guesses), Window(ngram)
        self.length = 0  # number of tokens processed


class Pool:
    """n-grams by first token, at most `capacity` per token, in order of insertion."""

    def __init__(self, ngram: int, capacity: int) -> None:
        self.ngram, self.capacity, self.size = ngram, capacity, 0
        self._grams: dict[int, dict[tuple[int, ...], None]] = {}

    def of(self, first: int) -> list[tuple[int, ...]]:
        """The n-grams of a token without their first token, the latest first."""
        return list(self._grams.get(first, ()))[::-1]

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """Adds an n-gram as the latest; drops the oldest beyond the capacity."""
        grams = self._grams.setdefault(first, {})
        self.size -= len(grams)
        grams.pop(rest, None)
        grams[rest] = None
        if len(grams) > self.capacity:
            del grams[next(iter(grams))]
        self.size += len(grams)

    def read(self, tokens: list[int]) -> None:
        """Adds every n-gram of a text."""
        for start in range(len(tokens) - self.ngram + 1):
            self.add(tokens[start], tuple(tokens[start + 1 : start + self.ngram]))


class Window:
    """Rows of guesses: rows[r][i] is the token r + i positions after the root.

    Later rows come from later passes. Starts as one row of copied text and grows to n - 1 rows, one
    per pass.
    """

    def __init__(self, ngram: int) -> None:
        self.height = ngram - 1  # rows of the full window
        self.rows: list[list[int]] = [[]]  # rows[0][0] is the last token
        self.columns = 0  # number of columns in the tree of this pass
        self._copied = 0  # tokens of the text used as first guesses

    def widen(self, max_columns: int, nodes: int, depth: int, text: list[int]) -> None:
        """Sets the number of columns, at most `max_columns`, to fit into `nodes` and `depth`.

        New columns are filled with tokens of the text.
        """
        height = len(self.rows)
        self.columns = max(0, min(max_columns, (nodes + 1) // height, depth - height + 2))
        self.rows[0][:1] = text[-1:]
        for row in self.rows:
            for _ in range(len(row), self.columns):
                row.append(text[self._copied % len(text)])
                self._copied += 1

    def paths(self) -> list[tuple[int, ...]]:
        """The path above the new guess of each column: row 0 up to the column, then the column."""
        trunk, above = self.rows[0], self.rows[1:]
        return [(*trunk[1 : i + 1], *(row[i] for row in above)) for i in range(self.columns)]

    def advance(self, best: list[int], count: int) -> list[tuple[int, tuple[int, ...]]]:
        """Adds `best` as the newest row and moves the root by `count` tokens.

        Returns the n-grams of a full window: first token and rest.
        """
        grams = []
        if len(self.rows) == self.height:
            grams = list(zip(self.rows[0], zip(*self.rows[1:], best, strict=False), strict=False))
        if best:
            self.rows.append(best)
        if len(self.rows) > self.height:  # row 1 becomes row 0, one position later
            del self.rows[0]
            count -= 1
        self.rows = [row[count:] for row in self.rows]
        self.columns = 0
        return grams


class Trie:
    """A tree of POINT nodes with distinct tokens under each parent."""

    def __init__(self) -> None:
        self._tree = TreeBuilder()
        self._where: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._tree)

    def add(self, path: tuple[int, ...], max_nodes: int) -> None:
        """Adds a path, cut where the tree has `max_nodes` nodes."""
        node = -1
        for token in path:
            found = self._where.get((node, token))
            if found is None:
                if len(self._tree) >= max_nodes:
                    return
                found = self._where[node, token] = self._tree.add(token, node)
            node = found

    def build(self) -> Tree:
        """The finished tree."""
        return self._tree.build()


def best_tokens(tree: Tree, paths: list[tuple[int, ...]], logits: torch.Tensor) -> list[int]:
    """The top token after each path, by logits [n + 1, V] of the root and the nodes of a tree.

    Ends before the first path that the tree lacks: another drafter may have changed it.
    """
    edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    where = {edge: node for node, edge in enumerate(edges)} if paths else {}
    rows: list[int] = []
    for path in paths:
        node: int | None = -1
        for token in path:
            node = where.get((node, token)) if node is not None else None
        if node is None:
            break
        rows.append(node + 1)
    if logits.device.type == "cpu":  # NumPy's argmax is faster
        return [int(logits[row].float().numpy().argmax()) for row in rows]
    index = to_device(np.array(rows, np.int64), logits.device)
    return logits.index_select(0, index).argmax(-1).cpu().tolist()
