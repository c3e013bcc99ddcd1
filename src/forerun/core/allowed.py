"""Which tokens the shapers of a sequence allow in its drafts.

A proposal is restricted before tokens are drawn from it, so drawn nodes stay exact. Of nodes that
exist, only those are removed that no draw decides: see `legal_part`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.core.logits import advance
from forerun.core.records import Sequence
from forerun.core.tree import POINT, Proposal, Tree

Path = tuple[int, ...]  # tokens below the root
States = tuple[Any, ...]  # of the shapers
MAX_TESTS = 16  # of single tokens; more cost as much as a mask
MAX_TESTS_WITHOUT_MASK = 256  # a rejected draft costs less than more tests


class AllowedTokens:
    """The tokens that the shapers of a sequence allow after its text and a path."""

    def __init__(self, seq: Sequence) -> None:
        self._shapers = seq.shapers
        self._states: dict[Path, States] = {(): seq.states}

    @classmethod
    def of(cls, seq: Sequence) -> AllowedTokens | None:
        """None if no shaper of the sequence forbids tokens."""
        pairs = zip(seq.shapers, seq.states, strict=True)
        is_bound = any(shaper.forbids and state is not None for shaper, state in pairs)
        return cls(seq) if is_bound else None

    def allows(self, path: Path, token: int) -> bool:
        """Whether `token` may follow the path."""
        pairs = zip(self._shapers, self.states(path), strict=True)
        return all(state is None or shaper.allows(state, token) for shaper, state in pairs)

    def forced(self, path: Path) -> list[int]:
        """Tokens that the only possible text after the path begins with, if it is known."""
        pairs = zip(self._shapers, self.states(path), strict=True)
        runs = (shaper.forced(state) for shaper, state in pairs if state is not None)
        return list(next((run for run in runs if len(run)), ()))

    def forced_run(self, count: int) -> Path:
        """Up to `count` tokens of which each is forced by those before it."""
        path: Path = ()
        while len(path) < count and (run := self.forced(path)):
            path = (*path, *run)
        return path[:count]

    def restrict(self, path: Path, q: Proposal | None) -> Proposal | None:
        """q without forbidden tokens, renormalised; None if no token is left."""
        if q is None:
            return None
        kept = self._kept(path, q.ids)
        mass = q.probs[kept].sum()
        if kept.all() or not mass > 0:
            return q if mass > 0 else None
        return Proposal(q.ids[kept], q.probs[kept] / mass, q.level)

    def _kept(self, path: Path, ids: np.ndarray) -> np.ndarray:
        """Which of the tokens are allowed, bool [n]: by a mask if they are many.

        Too many for tests without a mask are kept: a forbidden one that is drawn is rejected.
        """
        kept = np.ones(len(ids), dtype=bool)
        for shaper, state in zip(self._shapers, self.states(path), strict=True):
            if state is None or not shaper.forbids:
                continue
            mask = shaper.mask(state) if len(ids) > MAX_TESTS else None
            if mask is not None:
                kept &= mask[ids]
            elif len(ids) <= MAX_TESTS_WITHOUT_MASK:
                for i in np.flatnonzero(kept).tolist():
                    kept[i] = shaper.allows(state, int(ids[i]))
        return kept

    def states(self, path: Path) -> States:
        """The shaper states after the path."""
        if path not in self._states:
            self._states[path] = advance(self._shapers, self.states(path[:-1]), path[-1])
        return self._states[path]


def legal_part(tree: Tree, allowed: AllowedTokens) -> Tree:
    """The tree without nodes below forbidden tokens, and without forbidden POINT nodes.

    Stays: a forbidden node that was drawn, and one with a drawn sibling after it. Whether they
    exist depends on draws, and verification counts on their rejection.
    """
    if not len(tree):
        return tree
    parents, is_drawn = tree.parents.tolist(), (tree.laws != POINT).tolist()
    last_drawn: dict[int, int] = {}  # parent -> its last drawn child
    for node, parent in enumerate(parents):
        if is_drawn[node]:
            last_drawn[parent] = node
    paths: dict[int, Path] = {-1: ()}  # of nodes with allowed tokens
    kept = np.zeros(len(tree), dtype=bool)
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), parents, strict=True)):
        if parent not in paths:
            continue
        if is_legal := allowed.allows(paths[parent], token):
            paths[node] = (*paths[parent], token)
        kept[node] = is_legal or node <= last_drawn.get(parent, -1)
    return tree if kept.all() else tree.part(kept)
