"""How the tokens of a request came, step by step, for clients that ask for a trace.

A token is accepted from a drafter, or the target's own: corrected where all drafts at its place
were rejected, a bonus where a path was accepted down to its leaf, plain where nothing was drafted.
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
    accepted: list[int]  # nodes that became text, from the top down
    own: int | None  # the target's own token; None where the text ended before it
    kind: str  # how the own token came

    @property
    def num_tokens(self) -> int:
        """Tokens that the step gave."""
        return len(self.accepted) + (self.own is not None)


@dataclass(frozen=True)
class Span:
    """Text of one token; `drafter` is empty unless accepted."""

    text: str
    kind: str
    drafter: str = ""


@dataclass(frozen=True)
class News:
    """What happened since a client was last told."""

    spans: list[Span]
    rounds: list[Round]


@dataclass
class Trace:
    """How the tokens of one sequence came. drafter: its name where trees do not tell one."""

    drafter: str
    _of: list[tuple[str, str]] = field(default_factory=list)  # kind and drafter of each token
    _rounds: list[Round] = field(default_factory=list)  # not told yet

    def add(self, tree: Tree, verdict: Verdict, count: int, before: int) -> None:
        """One more step, which gave `count` tokens after the `before` that there were."""
        self._of += [(PLAIN, "")] * (before - len(self._of))  # of a step that failed half-way
        drafters = list(tree.sources) or [self.drafter] * len(tree)
        accepted = verdict.nodes[:count]
        kind = ending(tree, verdict.nodes)
        own = verdict.token if count > len(accepted) else None
        self._rounds.append(Round(tree, drafters, accepted, own, kind))
        self._of += [(ACCEPTED, drafters[node]) for node in accepted]
        self._of += [(kind, "")] * (own is not None)

    def news(self, text: str, begins: list[int], start: int) -> News:
        """Spans of text[start:] and the steps since the last call.

        begins: where the text of each token begins, as that of one does at `start`.
        """
        rounds, self._rounds = self._rounds, []
        spans = []
        for k in range(bisect_left(begins, start), len(begins)):
            stop = begins[k + 1] if k + 1 < len(begins) else len(text)
            if part := text[begins[k] : stop]:
                spans.append(Span(part, *(self._of[k] if k < len(self._of) else (PLAIN, ""))))
        return News(spans, rounds)


class Traces:
    """Listener: traces of the sequences that are watched; the others cost nothing."""

    def watch(self, seq: Sequence, drafter: str) -> Trace:
        """The trace of a sequence, from its next step on."""
        return seq.scratch.setdefault(self, Trace(drafter))

    def __call__(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            if (trace := seq.scratch.get(self)) is not None:
                count = len(step.emitted[i])
                trace.add(step.trees[i], step.verdicts[i], count, seq.num_generated - count)


def ending(tree: Tree, nodes: list[int]) -> str:
    """How the token after the accepted nodes came."""
    if not len(tree):
        return PLAIN
    return CORRECTED if (tree.parents == (nodes[-1] if nodes else -1)).any() else BONUS


def to_dict(news: Iterable[News], text: Callable[[int], str]) -> dict[str, Any]:
    """The form that clients get; `text` gives the text of one token."""
    news = list(news)
    return {
        "spans": [_span(span) for one in news for span in one.spans],
        "steps": [_step(done, text) for one in news for done in one.rounds],
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
