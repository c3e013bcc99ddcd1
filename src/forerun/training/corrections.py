"""Positions where the target corrected the draft, collected from the steps of an engine.

Row r of a text is the distribution of token r + 1. If token t replaced a rejected draft token, the
distributions that disagreed are those of row t - 1. A step with an accepted draft and a bonus token
corrects nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from forerun.core.records import Sequence, Step

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
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in vars(self).values())


@dataclass
class RequestStats:
    """Acceptance of the drafts of one request. Tried: reached by verification."""

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
        self.num_requests = 0  # since the last `take`, with those that had no correction
        self.num_dropped = 0
        self._episodes: deque[Episode] = deque()
        self._lock = threading.Lock()

    def add(self, episode: Episode | None) -> None:
        """Adds a finished request; None: it had no correction."""
        with self._lock:
            self.num_requests += 1
            if episode is not None:
                self._episodes.append(episode)
            while self.num_tokens > self.max_tokens:
                self._episodes.popleft()
                self.num_dropped += 1

    def take(self) -> list[Episode]:
        """Removes and returns all episodes, oldest first."""
        with self._lock:
            found = list(self._episodes)
            self._episodes.clear()
            self.num_requests = 0
            return found

    @property
    def num_tokens(self) -> int:
        """Tokens of all episodes."""
        return sum(len(episode.tokens) for episode in self._episodes)

    @property
    def nbytes(self) -> int:
        """Bytes of all episodes."""
        return sum(episode.nbytes for episode in list(self._episodes))


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
class _Open:
    """A request that runs."""

    kind: str
    is_held: bool
    stats: RequestStats = field(default_factory=RequestStats)
    rows: list[int] = field(default_factory=list)
    tops: list[tuple[np.ndarray, np.ndarray, float]] = field(default_factory=list)
    has_pending: bool = False  # compat: the next root row is recorded


class Corrections:
    """Listener of an engine: fills an error buffer per class, and holds out some requests.

    class_of: class of a request. on_end: called with class, episode, whether it is held out, and
    statistics of every finished request; cancelled requests are dropped. A held-out request has all
    tried rows instead of the corrected ones.
    top_k: stored tokens per row; 0: all. vocab_size: of the draft. max_length: rows beyond it are
    not recorded. hold_every: every n-th request of a class is held out; 0: none.
    compat: records what the published code trains on: the row after each corrected token and after
    each bonus token.
    """

    def __init__(
        self,
        class_of: ClassOf,
        on_end: Callable[[str, Episode | None, bool, RequestStats], None],
        *,
        vocab_size: int,
        top_k: int = 64,
        max_length: int = 512,
        hold_every: int = 8,
        compat: bool = False,
    ) -> None:
        self.class_of, self.on_end = class_of, on_end
        self.vocab_size, self.top_k = vocab_size, top_k or vocab_size
        self.max_length, self.hold_every, self.compat = max_length, hold_every, compat
        self._num: dict[str, int] = {}  # requests by class

    def __call__(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            if (request := self._open(seq)) is not None:
                self._record(request, step, i)
                if seq.finish is not None:
                    del seq.scratch[self]
                    self._end(request, seq)

    def _open(self, seq: Sequence) -> _Open | None:
        if self not in seq.scratch:
            kind = self.class_of(seq)
            if kind is None:
                return None
            num = self._num[kind] = self._num.get(kind, -1) + 1
            seq.scratch[self] = _Open(kind, bool(self.hold_every) and num % self.hold_every == 0)
        return seq.scratch[self]

    def _record(self, request: _Open, step: Step, i: int) -> None:
        tried = tried_rows(step, i)
        self._count(request.stats, step, i, tried)
        if request.is_held:
            found = tried
        elif self.compat:
            found = [(step.start(i) - 1, -1)] if request.has_pending else []
            request.has_pending = len(step.trees[i]) > 0
        else:
            one = corrected_row(step, i)
            found = [] if one is None else [one]
        for row, node in found:
            if row < self.max_length:
                request.rows.append(row)
                request.tops.append(self._top(step.laws[i].rows.row(node)))

    def _count(self, stats: RequestStats, step: Step, i: int, tried: list[tuple[int, int]]) -> None:
        tree = step.trees[i]
        stats.steps += 1
        stats.tokens += len(step.emitted[i])
        stats.tried += len(tried)
        stats.accepted += min(len(step.verdicts[i].nodes), len(step.emitted[i]))
        for _, node in tried:
            child = tree.children(node)[0]
            p, q = step.laws[i][node], tree.q(child)
            token = int(tree.tokens[child])
            overlap = p[token] if q is None else np.minimum(p[q.ids], q.probs).sum()
            stats.overlap += float(overlap)

    def _top(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Ids [k] and log-probabilities [k] of the likeliest tokens; log of the other mass."""
        row = np.array(logits[: self.vocab_size], np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        k = min(self.top_k, len(row))
        ids = np.arange(k) if k == len(row) else np.argpartition(row, -k)[-k:]
        tail = max(1.0 - float(np.exp(row[ids]).sum()), 1e-9)
        return ids.astype(np.int32), row[ids].astype(np.float32), float(np.log(tail))

    def _end(self, request: _Open, seq: Sequence) -> None:
        episode = None
        if request.rows:
            ids, logp, tail = zip(*request.tops, strict=True)
            episode = Episode(
                np.array(seq.tokens[: request.rows[-1] + 1], np.int32),
                np.array(request.rows, np.int64),
                np.stack(ids),
                np.stack(logp),
                np.array(tail, np.float32),
            )
        self.on_end(request.kind, episode, request.is_held, request.stats)
