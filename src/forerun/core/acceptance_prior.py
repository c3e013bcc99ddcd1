"""Acceptance probability of a draft node, estimated from earlier drafts.

The acceptance of a child, given an accepted parent and rejected earlier siblings, is estimated from
three facts known before the draw: its rank among the siblings, the largest probability of q, and
the level of q (own or shared memory, and the context length). Products along a path rank all
places of a tree. EAGLE-2 (Li et al., 2024) uses the draft model's probabilities as factors; here
the factors are counted.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from forerun.utils.jit import kernel

CONFIDENCE_BOUNDS = np.array([0.4, 0.6, 0.8, 0.9, 0.97])  # of the largest probability of q
# Level of q: 0 own memory, longest context; 1 own memory, shorter context; 2 and 3 the same for
# the shared memory behind it.
NUM_LEVELS = 4
NUM_GRADES = NUM_LEVELS * (len(CONFIDENCE_BOUNDS) + 1)  # level by level, lowest confidence first
NUM_RANKS = 5  # later children share the last rank; grade x NUM_RANKS + rank fits an int8
HALF_LIFE_TRIALS = 4000.0  # trials in a cell after which its counts are halved
# Prior acceptance of child 0, 1, ... by grade.
SHARED_SAMPLED_PRIOR = np.array(  # of each shared level
    [
        [0.24, 0.20, 0.19, 0.17, 0.12],
        [0.38, 0.33, 0.22, 0.14, 0.11],
        [0.57, 0.45, 0.22, 0.15, 0.12],
        [0.76, 0.40, 0.20, 0.13, 0.10],
        [0.78, 0.37, 0.18, 0.12, 0.10],
        [0.86, 0.28, 0.17, 0.06, 0.05],
    ]
)
SAMPLED_PRIOR = np.vstack(
    (
        [
            # own memory, longest context
            [0.37, 0.27, 0.23, 0.15, 0.11],
            [0.48, 0.43, 0.31, 0.16, 0.12],
            [0.64, 0.48, 0.20, 0.13, 0.12],
            [0.79, 0.45, 0.30, 0.13, 0.10],
            [0.81, 0.35, 0.27, 0.14, 0.12],
            [0.89, 0.17, 0.14, 0.12, 0.17],
            # own memory, shorter context
            [0.20, 0.17, 0.17, 0.18, 0.14],
            [0.27, 0.24, 0.18, 0.10, 0.06],
            [0.37, 0.29, 0.19, 0.06, 0.02],
            [0.50, 0.28, 0.09, 0.05, 0.07],
            [0.51, 0.25, 0.18, 0.10, 0.03],
            [0.68, 0.14, 0.08, 0.10, 0.05],
        ],
        SHARED_SAMPLED_PRIOR,  # longest
        SHARED_SAMPLED_PRIOR,  # shorter
    )
)  # measured with STAND on the embedded reasoner's training problems, temperatures 0.6 and 1
SHARED_TOP_PRIOR = np.array(
    [
        [0.16, 0.15, 0.16, 0.15, 0.13],
        [0.31, 0.25, 0.17, 0.08, 0.06],
        [0.50, 0.33, 0.20, 0.08, 0.08],
        [0.63, 0.24, 0.10, 0.08, 0.07],
        [0.63, 0.20, 0.11, 0.10, 0.07],
        [0.75, 0.11, 0.10, 0.03, 0.03],
    ]
)
TOP_PRIOR = np.vstack(
    (
        [
            # own memory, longest context
            [0.27, 0.32, 0.21, 0.25, 0.16],
            [0.37, 0.48, 0.25, 0.17, 0.09],
            [0.48, 0.57, 0.29, 0.23, 0.11],
            [0.70, 0.50, 0.29, 0.21, 0.11],
            [0.77, 0.58, 0.24, 0.21, 0.11],
            [0.88, 0.21, 0.20, 0.20, 0.11],
            # own memory, shorter context
            [0.15, 0.17, 0.19, 0.19, 0.18],
            [0.25, 0.23, 0.20, 0.18, 0.12],
            [0.34, 0.26, 0.19, 0.11, 0.02],
            [0.45, 0.30, 0.15, 0.04, 0.04],
            [0.43, 0.24, 0.13, 0.06, 0.09],
            [0.65, 0.12, 0.07, 0.05, 0.08],
        ],
        SHARED_TOP_PRIOR,  # longest
        SHARED_TOP_PRIOR,  # shorter
    )
)  # the same for trees of the most probable tokens, temperatures 0 and 0.6
PRIOR_TRIALS = 8.0  # trials that the prior counts for
SNAPSHOT_BYTES = 4 * 4 * SAMPLED_PRIOR.size  # trials and hits of sampled and top trees, float32


class AcceptanceCounts:
    """Counts of trials and acceptances by grade and rank; float64 [NUM_GRADES, NUM_RANKS] each.

    A node's cell is grade x NUM_RANKS + rank, its index into the flattened arrays.
    """

    def __init__(self, *, drawn: bool = True) -> None:
        prior = SAMPLED_PRIOR if drawn else TOP_PRIOR
        self.tries = np.full(prior.shape, PRIOR_TRIALS)
        self.hits = prior * PRIOR_TRIALS

    @property
    def rates(self) -> np.ndarray:
        """Acceptance rates, float64 [NUM_GRADES, NUM_RANKS]."""
        return self.hits / self.tries

    def learn(self, parents: np.ndarray, cells: np.ndarray, accepted: list[int]) -> None:
        """Counts one verified tree; `accepted` lists its accepted nodes from the top down.

        parents int32 [n], cells int8 [n]; cell -1: node of another drafter, not counted.
        """
        path = np.array([-1, *accepted], dtype=np.int64)
        count(parents, cells, path, self.tries, self.hits)

    @classmethod
    def sum(cls, parts: Many[AcceptanceCounts], *, drawn: bool = True) -> AcceptanceCounts:
        """The counts of several memories added up, with the prior counted once."""
        found = cls(drawn=drawn)
        prior = found.hits.copy()
        found.tries += np.maximum(sum(part.tries - PRIOR_TRIALS for part in parts), 0.0)
        found.hits += sum(part.hits - prior for part in parts)
        np.clip(found.hits, 0.0, found.tries, out=found.hits)
        scale = np.minimum(1.0, HALF_LIFE_TRIALS / found.tries)
        found.tries *= scale
        found.hits *= scale
        return found


def are_counts(tries: np.ndarray, hits: np.ndarray) -> bool:
    """Whether arrays can hold two `AcceptanceCounts`: float32 [2, NUM_GRADES, NUM_RANKS]."""
    shape = (2, *SAMPLED_PRIOR.shape)
    has_form = all(a.dtype == np.float32 and a.shape == shape for a in (tries, hits))
    return has_form and bool(
        np.all((tries > 0) & (tries <= HALF_LIFE_TRIALS + 1) & (hits >= 0) & (hits <= tries))
    )


@kernel
def grade(top: float, level: int) -> int:
    """The grade of a q of this level with largest probability `top`."""
    found = 0
    while found < len(CONFIDENCE_BOUNDS) and top >= CONFIDENCE_BOUNDS[found]:
        found += 1
    return level * (len(CONFIDENCE_BOUNDS) + 1) + found


@kernel
def count(
    parents: np.ndarray, cells: np.ndarray, path: np.ndarray, tries: np.ndarray, hits: np.ndarray
) -> None:
    """Adds a trial for every child of the nodes path [m], up to and including the accepted child.

    tries, hits float64 [NUM_GRADES, NUM_RANKS]. Children of cell -1 are not counted.
    """
    for i in range(len(path)):
        accepted = path[i + 1] if i + 1 < len(path) else -1
        for child in range(path[i] + 1, len(parents)):
            if parents[child] != path[i]:
                continue
            if cells[child] >= 0:
                at = cells[child] // NUM_RANKS, cells[child] % NUM_RANKS
                if tries[at] > HALF_LIFE_TRIALS:
                    tries[at] *= 0.5
                    hits[at] *= 0.5
                tries[at] += 1.0
                hits[at] += child == accepted
            if child == accepted:
                break
