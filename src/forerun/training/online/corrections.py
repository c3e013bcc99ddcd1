"""Positions where the target corrected the draft, collected from the steps of an engine.

Row r of a text is the distribution of token r + 1. If token t replaced a rejected draft token, the
distributions that disagreed are those of row t - 1. A step with an accepted draft and a bonus token
corrects nothing. With `records_undrafted` the rows of steps without a draft are collected too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.core.records import Sequence, Step
from forerun.core.tree import Tree

ClassOf = Callable[[Sequence], str | None]  # the class of a request; None: not collected


@dataclass(frozen=True, eq=False)
class Episode:
    """The supervised rows of one request, with the k most likely tokens of the target at each."""

    tokens: np.ndarray  # int32 [n], up to the last supervised row
    rows: np.ndarray  # int64 [m], indices into `tokens`
    ids: np.ndarray  # int32 [m, k]
    logp: np.ndarray  # float32 [m, k], at temperature 1
    tail: np.ndarray  # float32 [m], log of the mass of all other tokens

    @property
    def size(self) -> int:
        """Number of supervised positions."""
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in vars(self).values())


OnEnd = Callable[[str, Episode | None, bool, "RequestStats"], None]


@dataclass
class RequestStats:
    """Acceptance of the drafts of one request, in its recorded steps.

    Tried: reached by verification.
    """

    steps: int = 0
    tokens: int = 0
    tried: int = 0
    accepted: int = 0
    overlap: float = 0.0  # sum of min(p, q) over tried positions

    @property
    def alpha(self) -> float:
        """Mean of sum_x min(p(x), q(x)) over tried positions; nan without any."""
        return self.overlap / self.tried if self.tried else float("nan")

    @property
    def tau(self) -> float:
        """Tokens per target pass."""
        return self.tokens / max(1, self.steps)


class ErrorBuffer:
    """Episodes of one class until the next update. Thread-safe.

    max_tokens: beyond it the oldest episodes are dropped.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_requests = 0  # since the last `take`, also without a recorded row
        self.num_dropped = 0
        self.num_tokens = 0  # of all episodes; other threads read it without the lock
        self._episodes: deque[Episode] = deque()
        self._lock = threading.Lock()

    def add(self, episode: Episode | None) -> None:
        """Adds a finished request; None: nothing of it was recorded."""
        with self._lock:
            self.num_requests += 1
            if episode is not None:
                self._episodes.append(episode)
                self.num_tokens += len(episode.tokens)
            while self.num_tokens > self.max_tokens:
                self.num_tokens -= len(self._episodes.popleft().tokens)
                self.num_dropped += 1

    def take(self) -> list[Episode]:
        """Removes and returns all episodes, oldest first."""
        with self._lock:
            found = list(self._episodes)
            self._episodes.clear()
            self.num_requests = self.num_tokens = 0
            return found

    def episodes(self) -> list[Episode]:
        """All episodes, oldest first; they stay."""
        with self._lock:
            return list(self._episodes)

    @property
    def nbytes(self) -> int:
        """Bytes of all episodes."""
        return sum(episode.nbytes for episode in self.episodes())


def corrected_row(step: Step, i: int) -> tuple[int, int] | None:
    """(row, tree node) where the target corrected the draft of sequence i; None: it did not."""
    nodes, num = step.verdicts[i].nodes, len(step.emitted[i])
    node = nodes[-1] if nodes else -1
    if num <= len(nodes) or not step.trees[i].children(node):
        return None  # the correction was cut off, or the token is a bonus
    return step.start(i) + len(nodes) - 1, node


def tried_rows(step: Step, i: int) -> list[tuple[int, int]]:
    """(row, tree node) of every emitted token that was decided with a draft token."""
    tree, first = step.trees[i], step.start(i) - 1
    visited = enumerate(step.visited(i), first)
    return [(row, node) for row, node in visited if tree.children(node)]


@dataclass(eq=False)
class OpenRequest:
    """A request that runs, with its recorded rows and what is stored of each."""

    kind: str
    is_held: bool
    stats: RequestStats = field(default_factory=RequestStats)
    rows: list[int] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    pending_row: int = -1  # compat: recorded if the next recorded step begins with it; -1: none


class Corrections:
    """Listener of an engine: fills an error buffer per class, and holds out some requests.

    class_of: class of a request. on_end: called with class, episode, whether it is held out, and
    statistics of every finished request; cancelled requests are dropped. A held-out request has all
    tried rows instead of the corrected ones.
    top_k: stored tokens per row; 0: all. vocab_size: of the draft. max_length: rows beyond it are
    not recorded. hold_every: every n-th request of a class is held out; 0: none.
    compat: records what the published code trains on: the row after each corrected token and after
    each bonus token.
    records_undrafted: also records the row of each step without a draft.
    A caller may leave out steps (`record=False`): their rows are missing in the episodes. It must
    decide before it knows the step, so that the recorded rows are not chosen by their content.
    """

    def __init__(
        self,
        class_of: ClassOf,
        on_end: OnEnd,
        *,
        vocab_size: int,
        top_k: int = 64,
        max_length: int = 512,
        hold_every: int = 8,
        compat: bool = False,
        records_undrafted: bool = False,
    ) -> None:
        self.class_of, self.on_end = class_of, on_end
        self.vocab_size, self.top_k = vocab_size, top_k or vocab_size
        self.max_length, self.hold_every, self.compat = max_length, hold_every, compat
        self.records_undrafted = records_undrafted
        self.counts: dict[str, int] = {}  # number of the last request of each class

    def __call__(self, step: Step, record: bool = True) -> None:
        """record=False: records nothing and opens no request; only ends those that finished."""
        for i, seq in enumerate(step.seqs):
            if record and (request := self._open(seq)) is not None:
                self._record(request, step, i)
            if seq.finish is not None and (request := seq.scratch.pop(self, None)) is not None:
                self._end(request, seq)

    def _open(self, seq: Sequence) -> OpenRequest | None:
        if self not in seq.scratch:
            kind = self.class_of(seq)
            if kind is None:
                return None
            num = self.counts[kind] = self.counts.get(kind, -1) + 1
            is_held = bool(self.hold_every) and num % self.hold_every == 0
            seq.scratch[self] = OpenRequest(kind, is_held)
        return seq.scratch[self]

    def _record(self, request: OpenRequest, step: Step, i: int) -> None:
        tried = tried_rows(step, i)
        self._count(request.stats, step, i, tried)
        for row, node in self.rows_of(request, step, i, tried):
            if row < self.max_length:
                token = step.emitted[i][row + 1 - step.start(i)]
                request.rows.append(row)
                request.tops.append(self.stored(step.laws[i].rows.row(node), token))

    def rows_of(
        self, request: OpenRequest, step: Step, i: int, tried: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """(row, tree node) of what is recorded of a step. tried: see `tried_rows`."""
        if self.records_undrafted and not len(step.trees[i]):
            return [(step.start(i) - 1, -1)]
        if request.is_held:
            return tried
        if self.compat:
            root = step.start(i) - 1
            is_drafted = len(step.trees[i]) > 0
            found = [(root, -1)] if root == request.pending_row else []
            request.pending_row = root + len(step.emitted[i]) if is_drafted else -1
            return found
        one = corrected_row(step, i)
        return [] if one is None else [one]

    def stored(self, logits: np.ndarray, token: int) -> Any:
        """What is stored of a row: target logits [V], and the emitted token."""
        return top_of(log_probs(logits[: self.vocab_size]), self.top_k)

    def episode(self, request: OpenRequest, seq: Sequence) -> Episode | None:
        """The episode of a finished request with recorded rows."""
        ids, logp, tail = zip(*request.tops, strict=True)
        return Episode(
            np.array(seq.tokens[: request.rows[-1] + 1], np.int32),
            np.array(request.rows, np.int64),
            np.stack(ids),
            np.stack(logp),
            np.array(tail, np.float32),
        )

    def _count(self, stats: RequestStats, step: Step, i: int, tried: list[tuple[int, int]]) -> None:
        tree = step.trees[i]
        stats.steps += 1
        stats.tokens += len(step.emitted[i])
        stats.tried += len(tried)
        stats.accepted += min(len(step.verdicts[i].nodes), len(step.emitted[i]))
        for _, node in tried:
            child = tree.children(node)[0]
            stats.overlap += overlap(step.laws[i][node], tree, child)

    def _end(self, request: OpenRequest, seq: Sequence) -> None:
        episode = self.episode(request, seq) if request.rows else None
        self.on_end(request.kind, episode, request.is_held, request.stats)


def overlap(p: np.ndarray, tree: Tree, child: int) -> float:
    """sum_x min(p(x), q(x)) for the q that a node was drawn from.

    Of a LAZY node an unbiased estimate, min(1, p / q) of the drawn token.
    """
    token, q = int(tree.tokens[child]), tree.q(child)
    if q is not None:
        return float(np.minimum(p[q.ids], q.probs).sum())
    lazy = tree.lazy[child] if tree.lazy else None
    return float(p[token]) if lazy is None else min(1.0, float(p[token]) / lazy.prob(token))


def log_probs(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities at temperature 1, float64."""
    row = np.array(logits, np.float64)
    row -= row.max()
    return row - np.log(np.exp(row).sum())


def top_of(logp: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Ids [k] and log-probabilities [k] of the likeliest tokens; log of the other mass."""
    k = min(k, len(logp))
    ids = np.arange(k) if k == len(logp) else np.argpartition(logp, -k)[-k:]
    tail = max(1.0 - float(np.exp(logp[ids]).sum()), 1e-9)
    return ids.astype(np.int32), logp[ids].astype(np.float32), float(np.log(tail))
