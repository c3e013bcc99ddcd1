"""How each piece of a text came: accepted from which drafter, or the target's own token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Many
from dataclasses import dataclass

from forerun.core.records import Sequence, Step

OWN = "target"  # corrections, bonus tokens and plain steps


@dataclass(frozen=True)
class Piece:
    """Text of one origin: the name of a drafter, "draft" where it is unknown, or OWN."""

    text: str
    origin: str


class Origins:
    """Listener: the origin of every emitted token."""

    def __call__(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            tree, nodes = step.trees[i], step.verdicts[i].nodes
            names = [tree.sources[n] if tree.sources else "draft" for n in nodes]
            seq.scratch.setdefault(self, []).extend([*names, OWN][: len(step.emitted[i])])

    def pieces(self, seq: Sequence, text: str, start: int, begins: Many[int]) -> list[Piece]:
        """text[start:] cut where origins change; begins: where each token's text begins."""
        found: list[Piece] = []
        origins = seq.scratch.get(self, [])
        first = max(0, bisect_right(begins, start) - 1)
        for k in range(first, len(begins)):
            stop = begins[k + 1] if k + 1 < len(begins) else len(text)
            part = text[max(start, begins[k]) : stop]
            origin = origins[k] if k < len(origins) else OWN
            if part and found and found[-1].origin == origin:
                found[-1] = Piece(found[-1].text + part, origin)
            elif part:
                found.append(Piece(part, origin))
        return found
