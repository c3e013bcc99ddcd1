"""The law Q of the next target token, given a draft model and a trie of n-grams.

A target token is reached directly, if one draft token has its bytes, or by an n-gram: the draft
tokens of its text. Drawing goes down the trie as long as the drawn tokens match, emits the longest
match, and discards draws beyond it. The next token is drawn from the draft's distribution again, so
Q depends on the context only:

    Q(t) = reach(v) (1 - longer(v))
    reach(v)   probability of the draws d_1 .. d_n that lead to the node v of t
    longer(v)  probability that the draws after v end in a longer match

Where no match is possible otherwise, draws are restricted to tokens that lead to one, so Q sums
to 1. Needs the draft's rows along t and in the part of the trie below v.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Many

import numpy as np

from forerun.core.dice import Dice
from forerun.core.growing import Path
from forerun.models.vocab_map import NONE, VocabMap

Draws = Generator[Path, np.ndarray, tuple[int, Path]]  # wanted rows, rows, (target token, draws)
MAX_NGRAM = 8  # draft tokens


class NgramTrie:
    """Target tokens by the draft tokens of their text; node 0 is the root.

    vocab: the draft's ids to the target's. A draft token with a target token of its own is direct.
    """

    def __init__(self, vocab: VocabMap) -> None:
        self.direct, self.source = vocab.forward, vocab.back  # NONE: no counterpart
        self._first: np.ndarray | None = None  # see `first_draws`
        self.children: list[dict[int, int]] = [{}]  # of each node: draft token -> node
        self.tokens: list[int] = [NONE]  # target token of each node
        self.runs: dict[int, Path] = {}  # target token -> its draft tokens

    def add(self, token: int, run: Many[int]) -> None:
        """Adds an n-gram; the first one of a target token and of a run is kept."""
        is_known = token in self.runs or self.source[token] != NONE
        if is_known or not 2 <= len(run) <= MAX_NGRAM:
            return
        self._first = None
        node = 0
        for draft in run:
            if draft not in self.children[node]:
                self.children[node][draft] = len(self.tokens)
                self.children.append({})
                self.tokens.append(NONE)
            node = self.children[node][draft]
        if self.tokens[node] == NONE:
            self.tokens[node], self.runs[token] = token, tuple(run)

    @property
    def first_draws(self) -> np.ndarray:
        """Draft tokens that are direct or begin an n-gram, int64, ascending."""
        if self._first is None:
            begun = np.fromiter(self.children[0], np.int64)
            self._first = np.union1d(np.flatnonzero(self.direct != NONE), begun)
        return self._first

    def is_match(self, depth: int, draft: int, node: int) -> bool:
        """Whether a draw at this depth completes a target token; node: where it led, or NONE."""
        if depth == 0 and self.direct[draft] != NONE:
            return True
        return node != NONE and self.tokens[node] != NONE

    @property
    def nbytes(self) -> int:
        """Estimated bytes."""
        return 200 * len(self.tokens) + 150 * len(self.runs)


class TokenLaw:
    """Q after one context. fetch: the draft's distribution [V_d] after the context and a run.

    The trie must not change as long as Q is used.
    """

    def __init__(self, trie: NgramTrie, fetch: Callable[[Path], np.ndarray]) -> None:
        self.trie, self._fetch = trie, fetch
        self._rows: dict[Path, np.ndarray] = {}
        self._known: dict[int, float] = {}

    def draw(self, dice: Dice) -> Draws:
        """Draws a target token and its draft tokens; yields the runs that it needs rows of.

        The caller stops if `is_empty` after the first row.
        """
        run: Path = ()
        best: tuple[int, Path] | None = None
        node = 0
        while best is None or self.trie.children[node]:
            self._rows[run] = yield run
            ids, probs = self._choices(run, node, best is not None)
            draft = int(ids[dice.choice(probs)])
            if not run and self.trie.direct[draft] != NONE:
                best = int(self.trie.direct[draft]), (draft,)
            if draft not in self.trie.children[node]:
                break
            node, run = self.trie.children[node][draft], (*run, draft)
            if self.trie.tokens[node] != NONE:
                best = self.trie.tokens[node], run
        assert best is not None, "draws without a match are restricted to those with one"
        return best

    def sees(self, row: np.ndarray) -> TokenLaw:
        """The law with the draft's distribution after the context, [V_d]."""
        self._rows[()] = row
        return self

    @property
    def is_empty(self) -> bool:
        """Whether the draft's distribution has no mass on tokens that lead to a target token."""
        return not self.highest > 0

    @property
    def highest(self) -> float:
        """The largest probability of a first draw; known before it is drawn."""
        _, probs = self._choices((), 0, False)
        return float(probs.max(initial=0.0))

    def prob(self, token: int) -> float:
        """Q of one target token."""
        if token not in self._known:
            self._known[token] = self._prob(token)
        return self._known[token]

    def _prob(self, token: int) -> float:
        single = int(self.trie.source[token])
        run = self.trie.runs.get(token, ()) if single == NONE else (single,)
        reach, node, has_match = float(len(run) > 0), 0, False
        for depth, draft in enumerate(run):
            ids, probs = self._choices(run[:depth], node, has_match)
            reach *= float(probs[ids == draft].sum())
            if not reach > 0:
                return 0.0
            node = self.trie.children[node].get(draft, NONE)
            has_match = has_match or self.trie.is_match(depth, draft, node)
        return reach * (1.0 - self._longer(run, node)) if reach > 0 else 0.0

    def _longer(self, run: Path, node: int) -> float:
        """Probability that the draws after `run`, which has a match, end in a longer one."""
        children = {} if node == NONE else self.trie.children[node]
        if not children:
            return 0.0
        row = self._row(run)
        return sum(
            float(row[draft])
            * (1.0 if self.trie.tokens[child] != NONE else self._longer((*run, draft), child))
            for draft, child in children.items()
            if row[draft] > 0
        )

    def _choices(self, run: Path, node: int, has_match: bool) -> tuple[np.ndarray, np.ndarray]:
        """Draft tokens that may be drawn after `run`, and their probabilities."""
        row = self._row(run)
        if has_match:
            return np.arange(len(row)), row
        ids = np.fromiter(self.trie.children[node], np.int64) if run else self.trie.first_draws
        mass = row[ids].sum()
        if mass > 0:
            return ids, row[ids] / mass
        # no draw leads to a match: within a run any fixed law will do
        return ids, np.full(len(ids), 1.0 / len(ids)) if run else np.zeros(len(ids))

    def _row(self, run: Path) -> np.ndarray:
        if run not in self._rows:
            self._rows[run] = self._fetch(run)
        return self._rows[run]
