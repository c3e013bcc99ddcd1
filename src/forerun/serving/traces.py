"""Traces for clients: the origin of every token of a request, step by step.

A token is accepted from a drafter or drawn by the target. A target token is "corrected" if all
drafts at its position were rejected, "bonus" if a path was accepted down to its leaf, and "plain"
if nothing was drafted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from forerun.core.records import Sequence, Step, Verdict
from forerun.core.tree import Tree

ACCEPTED, CORRECTED, BONUS, PLAIN = "accepted", "corrected", "bonus", "plain"


@dataclass(frozen=True)
class Round:
    """One step of one sequence."""

    tree: Tree
    drafters: list[str]  # [n], of each node
    accepted: list[int]  # accepted nodes, from the root down
    own: int | None  # the target's token; None if the text ended before it
    kind: str  # of the target's token

    @property
    def num_tokens(self) -> int:
        """Number of tokens emitted by the step."""
        return len(self.accepted) + (self.own is not None)


@dataclass(frozen=True)
class Span:
    """The text of one token; `drafter` is empty unless accepted."""

    text: str
    kind: str
    drafter: str = ""


@dataclass(frozen=True)
class TraceUpdate:
    """New spans and steps since the last update."""

    spans: list[Span]
    rounds: list[Round]


@dataclass
class Trace:
    """The trace of one sequence. drafter: name for trees without sources."""

    drafter: str
    _origins: list[tuple[str, str]] = field(default_factory=list)  # kind, drafter of each token
    _rounds: list[Round] = field(default_factory=list)  # not taken yet

    def add(self, tree: Tree, verdict: Verdict, count: int, before: int) -> None:
        """Adds a step that emitted `count` tokens after `before` earlier ones."""
        self._origins += [(PLAIN, "")] * (before - len(self._origins))  # after a failed step
        drafters = list(tree.sources) or [self.drafter] * len(tree)
        accepted = verdict.nodes[:count]
        kind = target_token_kind(tree, verdict.nodes)
        own = verdict.token if count > len(accepted) else None
        self._rounds.append(Round(tree, drafters, accepted, own, kind))
        self._origins += [(ACCEPTED, drafters[node]) for node in accepted]
        self._origins += [(kind, "")] * (own is not None)

    def take_update(self, text: str, begins: list[int], start: int) -> TraceUpdate:
        """Spans of text[start:] and the steps since the last call.

        begins: offset of each token's text; `start` is one of them.
        """
        rounds, self._rounds = self._rounds, []
        spans = []
        for k in range(bisect_left(begins, start), len(begins)):
            stop = begins[k + 1] if k + 1 < len(begins) else len(text)
            if part := text[begins[k] : stop]:
                origin = self._origins[k] if k < len(self._origins) else (PLAIN, "")
                spans.append(Span(part, *origin))
        return TraceUpdate(spans, rounds)


class Traces:
    """Listener that records the traces of selected sequences."""

    def start(self, seq: Sequence, drafter: str) -> Trace:
        """Starts the trace of a sequence with its next step."""
        return seq.scratch.setdefault(self, Trace(drafter))

    def __call__(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            if (trace := seq.scratch.get(self)) is not None:
                count = len(step.emitted[i])
                trace.add(step.trees[i], step.verdicts[i], count, seq.num_generated - count)


def target_token_kind(tree: Tree, nodes: list[int]) -> str:
    """The kind of the token after the accepted nodes."""
    if not len(tree):
        return PLAIN
    return CORRECTED if (tree.parents == (nodes[-1] if nodes else -1)).any() else BONUS


def to_dict(updates: Iterable[TraceUpdate], text: Callable[[int], str]) -> dict[str, Any]:
    """The JSON form for clients; text: returns the text of one token."""
    updates = list(updates)
    return {
        "spans": [_span(span) for update in updates for span in update.spans],
        "steps": [_step(done, text) for update in updates for done in update.rounds],
    }


def _span(span: Span) -> dict[str, str]:
    drafter = {"drafter": span.drafter} if span.drafter else {}
    return {"text": span.text, "kind": span.kind} | drafter


def _step(done: Round, text: Callable[[int], str]) -> dict[str, Any]:
    return {
        "tokens": [text(token) for token in done.tree.tokens.tolist()],
        "parents": done.tree.parents.tolist(),
        "drafters": done.drafters,
        "accepted": done.accepted,
        "own": None if done.own is None else text(done.own),
        "kind": done.kind,
        "generated": done.num_tokens,
    }
