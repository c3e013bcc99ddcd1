"""How likely a drafted node is to be accepted, learned from what became of earlier ones.

The chance of a child, given that its parent was accepted and its earlier siblings were not, hangs
on three things known before it is drawn: its rank, how sure its parent's q is, and from whom and
how long the context is that q was learned after. Products along a path rank all places of a tree,
so nodes go where they pay: EAGLE-2 (Li et al., 2024) grows trees by such products of a draft
model's own probabilities; here the factors are measured.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from forerun.utils.jit import bare

SURE = np.array([0.4, 0.6, 0.8, 0.9, 0.97])  # bounds of the largest probability of q
# Levels, how q is known: from the text's own memory or, 2 more, from that of others behind it;
# after a context of the greatest length that is asked for or, 1 more, after a shorter one.
LEVELS = 4
GRADES = LEVELS * (len(SURE) + 1)  # level by level, the least sure first
RANKS = 5  # later children share the last rank; all cells are numbered in an int8
OLD = 4000.0  # trials after which the past counts half
# Acceptance of child 0, 1, ... by grade, believed at first, and what that belief weighs in trials.
OTHERS_DRAWN = np.array(  # at each level that is known by others
    [
        [0.24, 0.20, 0.19, 0.17, 0.12],
        [0.38, 0.33, 0.22, 0.14, 0.11],
        [0.57, 0.45, 0.22, 0.15, 0.12],
        [0.76, 0.40, 0.20, 0.13, 0.10],
        [0.78, 0.37, 0.18, 0.12, 0.10],
        [0.86, 0.28, 0.17, 0.06, 0.05],
    ]
)
FIRST_DRAWN = np.vstack(
    (
        [
            # its own, longest
            [0.37, 0.27, 0.23, 0.15, 0.11],
            [0.48, 0.43, 0.31, 0.16, 0.12],
            [0.64, 0.48, 0.20, 0.13, 0.12],
            [0.79, 0.45, 0.30, 0.13, 0.10],
            [0.81, 0.35, 0.27, 0.14, 0.12],
            [0.89, 0.17, 0.14, 0.12, 0.17],
            # its own, shorter
            [0.20, 0.17, 0.17, 0.18, 0.14],
            [0.27, 0.24, 0.18, 0.10, 0.06],
            [0.37, 0.29, 0.19, 0.06, 0.02],
            [0.50, 0.28, 0.09, 0.05, 0.07],
            [0.51, 0.25, 0.18, 0.10, 0.03],
            [0.68, 0.14, 0.08, 0.10, 0.05],
        ],
        OTHERS_DRAWN,  # longest
        OTHERS_DRAWN,  # shorter
    )
)  # measured: STAND, embedded reasoner, training problems, temperatures 0.6 and 1. Own levels:
# scopes group and tenant, a memory's first eight prompts; the mean over its level counts for 20
# trials. Others' levels: contexts of all lengths of a text's own. What others' contexts themselves
# fared on problems is a third less and cost copying and code 2 to 5 %, where they fare as well as
# its own: too low a belief is hardly put to the test, too high a one soon
OTHERS_BEST = np.array(
    [
        [0.16, 0.15, 0.16, 0.15, 0.13],
        [0.31, 0.25, 0.17, 0.08, 0.06],
        [0.50, 0.33, 0.20, 0.08, 0.08],
        [0.63, 0.24, 0.10, 0.08, 0.07],
        [0.63, 0.20, 0.11, 0.10, 0.07],
        [0.75, 0.11, 0.10, 0.03, 0.03],
    ]
)
FIRST_BEST = np.vstack(
    (
        [
            # its own, longest
            [0.27, 0.32, 0.21, 0.25, 0.16],
            [0.37, 0.48, 0.25, 0.17, 0.09],
            [0.48, 0.57, 0.29, 0.23, 0.11],
            [0.70, 0.50, 0.29, 0.21, 0.11],
            [0.77, 0.58, 0.24, 0.21, 0.11],
            [0.88, 0.21, 0.20, 0.20, 0.11],
            # its own, shorter
            [0.15, 0.17, 0.19, 0.19, 0.18],
            [0.25, 0.23, 0.20, 0.18, 0.12],
            [0.34, 0.26, 0.19, 0.11, 0.02],
            [0.45, 0.30, 0.15, 0.04, 0.04],
            [0.43, 0.24, 0.13, 0.06, 0.09],
            [0.65, 0.12, 0.07, 0.05, 0.08],
        ],
        OTHERS_BEST,  # longest
        OTHERS_BEST,  # shorter
    )
)  # the same for the best tokens, at temperatures 0 and 0.6
WEIGHT = 8.0
NUM_BYTES = 4 * 4 * FIRST_DRAWN.size  # of the counts of both kinds of trees, as saved


class Chances:
    """Counts of trials and acceptances by grade and rank; float64 [GRADES, RANKS] each.

    A node's cell is grade x RANKS + rank: its place in these arrays, flattened.
    """

    def __init__(self, *, drawn: bool = True) -> None:
        prior = FIRST_DRAWN if drawn else FIRST_BEST
        self.tries = np.full(prior.shape, WEIGHT)
        self.hits = prior * WEIGHT

    @property
    def rates(self) -> np.ndarray:
        """Shares accepted, float64 [GRADES, RANKS]."""
        return self.hits / self.tries

    def learn(self, parents: np.ndarray, cells: np.ndarray, accepted: list[int]) -> None:
        """Counts what became of the children of the root and of the accepted nodes, top down.

        parents int32 [n] of a tree, cells int8 [n]; nodes of cell -1 are those of others.
        """
        path = np.array([-1, *accepted], dtype=np.int64)
        count(parents, cells, path, self.tries, self.hits)

    @classmethod
    def sum(cls, parts: Many[Chances], *, drawn: bool = True) -> Chances:
        """As if one memory had counted what several did; each began with the same belief."""
        found = cls(drawn=drawn)
        belief = found.hits.copy()
        found.tries += np.maximum(sum(part.tries - WEIGHT for part in parts), 0.0)
        found.hits += sum(part.hits - belief for part in parts)
        np.clip(found.hits, 0.0, found.tries, out=found.hits)
        scale = np.minimum(1.0, OLD / found.tries)
        found.tries *= scale
        found.hits *= scale
        return found


def are_counts(tries: np.ndarray, hits: np.ndarray) -> bool:
    """Whether arrays can be those of two `Chances`: float32 [2, GRADES, RANKS]."""
    shape = (2, *FIRST_DRAWN.shape)
    has_form = all(a.dtype == np.float32 and a.shape == shape for a in (tries, hits))
    return has_form and bool(
        np.all((tries > 0) & (tries <= OLD + 1) & (hits >= 0) & (hits <= tries))
    )


@bare
def grade(top: float, level: int) -> int:
    """The grade of a q of this level whose largest probability is `top`."""
    found = 0
    while found < len(SURE) and top >= SURE[found]:
        found += 1
    return level * (len(SURE) + 1) + found


@bare
def count(
    parents: np.ndarray, cells: np.ndarray, path: np.ndarray, tries: np.ndarray, hits: np.ndarray
) -> None:
    """One trial for every child of the nodes path [m], down to the accepted one of each.

    tries, hits float64 [GRADES, RANKS]. Children of cell -1 are not counted.
    """
    for i in range(len(path)):
        accepted = path[i + 1] if i + 1 < len(path) else -1
        for child in range(path[i] + 1, len(parents)):
            if parents[child] != path[i]:
                continue
            if cells[child] >= 0:
                at = cells[child] // RANKS, cells[child] % RANKS
                if tries[at] > OLD:
                    tries[at] *= 0.5
                    hits[at] *= 0.5
                tries[at] += 1.0
                hits[at] += child == accepted
            if child == accepted:
                break
