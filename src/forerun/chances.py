"""How likely a drafted node is to be accepted, learned from what became of earlier ones.

The chance of a child, given that its parent was accepted and its earlier siblings were not, hangs
on two things known before it is drawn: its rank, and how sure its parent's q is. Products along a
path rank all places of a tree, so nodes go where they pay: EAGLE-2 (Li et al., 2024) grows trees
by such products of a draft model's own probabilities; here the factors are measured.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from forerun.tree import Tree

SURE = np.array([0.4, 0.6, 0.8, 0.9, 0.97])  # bounds of the grades: the largest probability of q
RANKS = 6  # later children share the last rank
OLD = 4000.0  # trials after which the past counts half
# Acceptance of child 0, 1, ... by grade, believed at first, and what that belief weighs in trials.
FIRST_DRAWN = np.array(
    [
        [0.24, 0.20, 0.19, 0.17, 0.12, 0.10],
        [0.38, 0.33, 0.22, 0.14, 0.11, 0.10],
        [0.57, 0.45, 0.22, 0.15, 0.12, 0.10],
        [0.76, 0.40, 0.20, 0.13, 0.10, 0.08],
        [0.78, 0.37, 0.18, 0.12, 0.10, 0.08],
        [0.86, 0.28, 0.17, 0.06, 0.05, 0.04],
    ]
)  # measured: STAND, embedded reasoner, training problems, temperatures 0.6 and 1
FIRST_BEST = np.array(
    [
        [0.16, 0.15, 0.16, 0.15, 0.13, 0.10],
        [0.31, 0.25, 0.17, 0.08, 0.06, 0.04],
        [0.50, 0.33, 0.20, 0.08, 0.08, 0.08],
        [0.63, 0.24, 0.10, 0.08, 0.07, 0.06],
        [0.63, 0.20, 0.11, 0.10, 0.07, 0.06],
        [0.75, 0.11, 0.10, 0.03, 0.03, 0.02],
    ]
)  # the same for the best tokens, at temperatures 0 and 0.6
WEIGHT = 8.0


class Chances:
    """Counts of trials and acceptances by grade and rank; float64 [grades, RANKS] each."""

    def __init__(self, *, drawn: bool = True) -> None:
        prior = FIRST_DRAWN if drawn else FIRST_BEST
        self.tries = np.full(prior.shape, WEIGHT)
        self.hits = prior * WEIGHT

    @property
    def rates(self) -> np.ndarray:
        """Shares accepted, float64 [grades, RANKS]."""
        return self.hits / self.tries

    def learn(self, tree: Tree, accepted: list[int]) -> None:
        """Counts what became of the children of the root and of the accepted nodes, top down."""
        assert tree.grades is not None, "a tree of another grower"
        path = np.array([-1, *accepted], dtype=np.int64)
        count(tree.parents, tree.grades, path, self.tries, self.hits)


@njit(cache=True, nogil=True)
def grade(top: float) -> int:
    """The grade of a q whose largest probability is `top`."""
    found = 0
    while found < len(SURE) and top >= SURE[found]:
        found += 1
    return found


@njit(cache=True, nogil=True)
def count(
    parents: np.ndarray, grades: np.ndarray, path: np.ndarray, tries: np.ndarray, hits: np.ndarray
) -> None:
    """One trial for every child of the nodes path [m], down to the accepted one of each.

    grades int8 [nodes + 1]: of the root's q, and of every node's.
    """
    for i in range(len(path)):
        g, rank = grades[path[i] + 1], 0
        accepted = path[i + 1] if i + 1 < len(path) else -1
        for child in range(path[i] + 1, len(parents)):
            if parents[child] != path[i]:
                continue
            at = min(rank, RANKS - 1)
            if tries[g, at] > OLD:
                tries[g, at] *= 0.5
                hits[g, at] *= 0.5
            tries[g, at] += 1.0
            rank += 1
            if child == accepted:
                hits[g, at] += 1.0
                break
