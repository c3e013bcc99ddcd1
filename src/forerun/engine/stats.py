"""Statistics of generation. Definitions (docs/structure.md, "Definitions"):

S verify passes, D drafted tokens, A accepted draft tokens, E examined tokens, G generated tokens,
C tokens that a stop string cut off; tau = (G + C) / S (plain decoding: 1), acceptance rate A / D,
examined rate A / E. Rates by position are unconditional: accepted at depth i over S.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

from forerun.core.records import Sequence, Step
from forerun.core.tree import Tree

COUNTS = ("passes", "drafted", "accepted", "examined", "generated", "cut")


@dataclass
class Stats:
    """Counters of one sequence, or of many added up."""

    passes: int = 0  # S
    drafted: int = 0  # D
    accepted: int = 0  # A
    examined: int = 0  # E
    generated: int = 0  # G
    accepted_at: Counter[int] = field(default_factory=Counter)  # depth from 1 -> count
    seconds: dict[str, float] = field(default_factory=dict)  # draft, forward, verify, other
    failures: int = 0  # errors of the drafter
    drafted_by: Counter[str] = field(default_factory=Counter)  # by name of the drafter
    accepted_by: Counter[str] = field(default_factory=Counter)
    cut: int = 0  # C

    @property
    def tau(self) -> float:
        """Tokens per pass, counting the correction or bonus token; at least 1."""
        return (self.generated + self.cut) / self.passes if self.passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def examined_rate(self) -> float:
        return self.accepted / self.examined if self.examined else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of engine time, including prefill."""
        total = sum(self.seconds.values())
        return self.generated / total if total else 0.0

    @property
    def per_position(self) -> list[float]:
        """Accepted tokens at depth i over S, i from 1."""
        deepest = max(self.accepted_at, default=0)
        return [self.accepted_at[i] / self.passes for i in range(1, deepest + 1)]

    def add(self, other: Stats) -> Stats:
        """Adds the counts of `other`; returns itself."""
        for name in (*COUNTS, "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("accepted_at", "drafted_by", "accepted_by"):
            getattr(self, name).update(getattr(other, name))
        self.spend(other.seconds)
        return self

    def spend(self, seconds: dict[str, float]) -> None:
        """Adds seconds by part."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        counts = {name: getattr(self, name) for name in COUNTS}
        rates = {
            "tau": round(self.tau, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "examined_rate": round(self.examined_rate, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "per_position": [round(rate, 4) for rate in self.per_position],
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }
        parts = {
            name: {"drafted": count, "accepted": self.accepted_by[name]}
            for name, count in self.drafted_by.items()
        }
        return counts | rates | {"by_drafter": parts, "failures": self.failures}


class Recorder:
    """The listener that keeps a `Stats` per sequence."""

    def of(self, seq: Sequence) -> Stats:
        """Counters of one sequence."""
        return seq.scratch.get(self) or Stats()

    def __call__(self, step: Step) -> None:
        times = {**step.times, "other": perf_counter() - step.clock}
        num = len(step.seqs)  # sequences share the time of a step evenly
        share = {name: seconds / num for name, seconds in times.items()}
        for i, seq in enumerate(step.seqs):
            stats = seq.scratch[self] = self.of(seq)
            tree, num_emitted = step.trees[i], len(step.emitted[i])
            stats.passes += 1
            stats.generated += num_emitted
            stats.spend(share)
            if len(tree):
                _count(stats, tree, step.verdicts[i].nodes, num_emitted)
            if seq.finish is not None and seq.end is not None:  # a stop string cut tokens off
                stats.cut = len(seq.tokens) - seq.end
                stats.generated -= stats.cut


class StepTimer:
    """Seconds of the parts of a step: the time between calls of `lap`.

    `record` is the first listener: it sets `Step.times` and `Step.clock`. Time in `step` before
    `draft` counts as drafting.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._times: dict[str, float] = {}
        self.is_open = False  # whether `step` has called `begin`

    def begin(self) -> None:
        """Starts the clock of a step."""
        self._last, self._times = perf_counter(), {}

    def lap(self, name: str) -> None:
        """Ends the part `name` of the step."""
        now = perf_counter()
        self._times[name], self._last = now - self._last, now

    def record(self, step: Step) -> None:
        """Listener: stores the times in the step."""
        step.times, step.clock = self._times, self._last


P = ParamSpec("P")
R = TypeVar("R")


def timed_step(call: Callable[P, R]) -> Callable[P, R]:
    """Decorator of an engine method that starts the engine's timer."""

    @wraps(call)
    def step(*args: P.args, **kwargs: P.kwargs) -> R:
        timer: StepTimer = args[0].timer  # type: ignore[attr-defined]
        timer.begin()
        timer.is_open = True
        try:
            return call(*args, **kwargs)
        finally:
            timer.is_open = False

    return step


def timed(call: Callable[P, R]) -> Callable[P, R]:
    """Decorator of an engine method that is one part of a step; `draft` is the first."""
    name = call.__name__

    @wraps(call)
    def part(*args: P.args, **kwargs: P.kwargs) -> R:
        timer: StepTimer = args[0].timer  # type: ignore[attr-defined]
        if name == "draft" and not timer.is_open:
            timer.begin()
        found = call(*args, **kwargs)
        timer.lap(name)
        return found

    return part


def _count(stats: Stats, tree: Tree, nodes: list[int], emitted: int) -> None:
    """Adds one draft and its accepted nodes."""
    size = len(tree.tokens)
    accepted = min(len(nodes), emitted)
    is_whole = emitted > len(nodes)  # no stop within the draft
    stats.drafted += size
    stats.accepted += accepted
    stats.examined += accepted + (is_whole and _was_rejected(tree, nodes))
    for depth in range(1, accepted + 1):
        stats.accepted_at[depth] += 1
    if not tree.sources:
        return
    name = tree.sources[0]
    if tree.sources.count(name) == size:
        stats.drafted_by[name] += size
        stats.accepted_by[name] += accepted
        return
    stats.drafted_by.update(tree.sources)
    stats.accepted_by.update(tree.sources[node] for node in nodes[:accepted])


def _was_rejected(tree: Tree, nodes: list[int]) -> bool:
    """Whether verification ended at a node with children."""
    return (nodes[-1] if nodes else -1) in tree.parents.tolist()
