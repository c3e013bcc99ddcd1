"""Counts what the loop did. Definitions are fixed (docs/structure.md, "Definitions"):

S verify passes, D drafted tokens, A accepted draft tokens, E examined tokens, G generated tokens;
tau = G / S (plain decoding: 1), acceptance rate A / D, examined rate A / E. Rates by position are
unconditional: accepted at depth i over S.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from time import perf_counter
from typing import Any

from forerun.core.records import Sequence, Step
from forerun.core.tree import Tree

LATE = 64  # steps
COUNTS = ("passes", "drafted", "accepted", "examined", "generated")


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
    failures: int = 0  # of the drafter, each of which cost a draft or a lesson
    drafted_by: Counter[str] = field(default_factory=Counter)  # where drafters tell their names
    accepted_by: Counter[str] = field(default_factory=Counter)

    @property
    def tau(self) -> float:
        """Tokens per pass, counting the correction or bonus token."""
        return self.generated / self.passes if self.passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def examined_rate(self) -> float:
        return self.accepted / self.examined if self.examined else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over engine time, prefill included."""
        total = sum(self.seconds.values())
        return self.generated / total if total else 0.0

    @property
    def per_position(self) -> list[float]:
        """Accepted at depth i over S, i from 1."""
        deepest = max(self.accepted_at, default=0)
        return [self.accepted_at[i] / self.passes for i in range(1, deepest + 1)]

    def add(self, other: Stats) -> Stats:
        """Adds another's counts to this one; returns itself."""
        for name in (*COUNTS, "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("accepted_at", "drafted_by", "accepted_by"):
            getattr(self, name).update(getattr(other, name))
        self.spend(other.seconds)
        return self

    def spend(self, seconds: dict[str, float]) -> None:
        """Adds time spent, part by part."""
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
    """The listener that keeps a `Stats` per sequence.

    It counts LATE steps at a time, when a sequence ends, and when `of` is called, whose answer
    holds until the next step: code that a pass has made cold is dear to enter.
    """

    def __init__(self) -> None:
        self._late: list[tuple[Any, ...]] = []  # what is counted of a step

    def of(self, seq: Sequence) -> Stats:
        """Counters of one sequence."""
        self.catch_up()
        return self._of(seq)

    def __call__(self, step: Step) -> None:
        times = {**step.times, "other": perf_counter() - step.clock}
        self._late.append((step.seqs, times, step.trees, step.verdicts, step.emitted))
        is_due = len(self._late) >= LATE
        for seq in step.seqs:
            is_due = is_due or seq.finish is not None
        if not is_due:
            return
        self.catch_up()
        for seq in step.seqs:
            if seq.end is not None:  # a stop string reached back: what it cut off is no output
                self._of(seq).generated -= len(seq.tokens) - seq.end

    def catch_up(self) -> None:
        """Counts what waits, which holds its sequences as they hold their counts."""
        late, self._late = self._late, []
        for seqs, steps in groupby(late, itemgetter(0)):
            _, times, *lists = zip(*steps, strict=True)
            # a pass is shared evenly by its batch
            spent = {name: sum(map(itemgetter(name), times)) / len(seqs) for name in times[0]}
            columns = [zip(*rows, strict=True) for rows in lists]  # by sequence, then by step
            for seq, trees, verdicts, emitted in zip(seqs, *columns, strict=True):
                stats = self._of(seq)
                stats.passes += len(times)
                stats.generated += sum(map(len, emitted))
                stats.spend(spent)
                for tree, verdict, tokens in zip(trees, verdicts, emitted, strict=True):
                    if len(tree.tokens):
                        _count(stats, tree, verdict.nodes, len(tokens))

    def _of(self, seq: Sequence) -> Stats:
        stats = seq.counts.get(self)
        if stats is None:
            stats = seq.counts[self] = Stats()
        return stats


def _count(stats: Stats, tree: Tree, nodes: list[int], emitted: int) -> None:
    """Adds the draft of a step that accepted nodes of it."""
    size = len(tree.tokens)
    accepted = min(len(nodes), emitted)
    is_whole = emitted > len(nodes)  # not cut off within the draft
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
    """Whether the walk ended at a node that had children."""
    return (nodes[-1] if nodes else -1) in tree.parents.tolist()
