"""The origin of each piece of a text: the drafter it was accepted from, or the target."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Many
from dataclasses import dataclass

from forerun.core.records import Sequence, Step

OWN = "target"  # corrections, bonus tokens and plain steps


@dataclass(frozen=True)
class Piece:
    """Text of one origin: the name of a drafter, "draft" if unknown, or OWN."""

    text: str
    origin: str


class Origins:
    """Listener: records the origin of every emitted token."""

    def __call__(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            tree, nodes = step.trees[i], step.verdicts[i].nodes
            names = [tree.sources[n] if tree.sources else "draft" for n in nodes]
            seq.scratch.setdefault(self, []).extend([*names, OWN][: len(step.emitted[i])])

    def pieces(self, seq: Sequence, text: str, start: int, starts: Many[int]) -> list[Piece]:
        """text[start:] split where the origin changes; starts: text offset of each token."""
        found: list[Piece] = []
        origins = seq.scratch.get(self, [])
        first = max(0, bisect_right(starts, start) - 1)
        for k in range(first, len(starts)):
            stop = starts[k + 1] if k + 1 < len(starts) else len(text)
            part = text[max(start, starts[k]) : stop]
            origin = origins[k] if k < len(origins) else OWN
            if part and found and found[-1].origin == origin:
                found[-1] = Piece(found[-1].text + part, origin)
            elif part:
                found.append(Piece(part, origin))
        return found
