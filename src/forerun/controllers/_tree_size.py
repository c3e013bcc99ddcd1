"""The arithmetic of a decision, compiled: after a pass every line of Python is cold.

Kernels write into arrays of their caller: for the type of each that it returns Numba calls into
Python.
"""

from __future__ import annotations

import numpy as np
from numba import njit

WEIGHT = 4.0  # trials that the first belief in a node stands for


@njit(cache=True, nogil=True)
def believe(
    counts: np.ndarray, weight: float, first: float, below: float, found: np.ndarray
) -> None:
    """Writes what is believed of nodes, [3, N + 1]: acceptance, chance to be made, tokens of that
    many.

    counts: drafts that might have had so many nodes, that had so many, and that had this node
    accepted, [3, N + 1]; weight: of one of now. first, below: acceptance that is believed in at
    first, of the first node and below a sure one. A node is believed to fare a little worse than
    the one before it.
    """
    num = counts.shape[1] - 1
    found[:] = 0.0
    asked = tries = 0.0
    for i in range(num - 1, -1, -1):  # a draft of more nodes had this one, too
        asked += counts[0, i + 1] / weight
        tries += counts[1, i + 1] / weight
        found[0, i] = tries
        found[1, i] = (tries + WEIGHT) / (asked + WEIGHT)
    rate = first / below
    for i in range(num):
        rate = (counts[2, i] / weight + WEIGHT * below * rate) / (found[0, i] + WEIGHT)
        found[0, i] = rate
        found[2, i + 1] = found[2, i] + rate
        if i:
            found[1, i] = min(found[1, i], found[1, i - 1])


@njit(cache=True, nogil=True)
def choose(
    beliefs: np.ndarray,
    prices: np.ndarray,
    num: int,
    roots: int,
    rows: np.ndarray,
    seconds: np.ndarray,
    aside: float,
    plain: float,
    margin: float,
    sizes: np.ndarray,
) -> tuple[float, float]:
    """Writes into `sizes` [S] how many nodes each of S sequences drafts; returns the marginal
    seconds per row, and tokens per second.

    Of the nodes of all the likeliest, as many as make the most tokens per second; none where these
    do not pay with `margin` fewer tokens than hoped for.

    beliefs: what `believe` finds, [S, 3, N + 1]. prices: of each the factor of its luck, seconds
    of a draft and of a node, [S, 3]. num: sequences of the step, S or more. roots: rows of a
    pass without drafts. rows, seconds: of passes. aside: seconds beside the pass where anybody
    drafts. plain: tokens per second without drafts.
    """
    size, nodes = len(beliefs), beliefs.shape[2] - 1
    chances = np.empty(size * nodes)
    for s in range(size):
        least = np.inf
        for i in range(nodes):
            least = min(least, beliefs[s, 0, i])
            chances[s * nodes + i] = -prices[s, 0] * least
    order = np.argsort(chances, kind="mergesort")
    # of the nodes so far: tokens beyond one per sequence, seconds of drafting them
    hoped = beside = best_speed = best_hoped = best_rows = best_pass = 0.0
    made, taken = float(roots), 0  # rows, on average; nodes of the best
    for k in range(len(order)):
        s, i = order[k] // nodes, order[k] % nodes
        chance = beliefs[s, 1, i]
        made += chance
        hoped += prices[s, 0] * chance * beliefs[s, 0, i]
        beside += chance * prices[s, 2] + (prices[s, 1] if i == 0 else 0.0)
        whole = _pass(made, rows, seconds)
        speed = (num + hoped) / (whole + beside + aside)
        if speed > best_speed:
            best_speed, best_hoped, best_rows, best_pass, taken = speed, hoped, made, whole, k + 1
    sizes[:] = 0
    if (num + (1 - margin) * best_hoped) * best_speed <= plain * (num + best_hoped):
        return 0.0, 0.0
    firsts = roots
    for k in range(taken):
        sizes[order[k] // nodes] += 1
        firsts += order[k] % nodes == 0
    more = best_pass - _pass(float(firsts), rows, seconds)
    return more / max(best_rows - firsts, 1.0), best_speed


@njit(cache=True, nogil=True)
def _pass(num: float, rows: np.ndarray, seconds: np.ndarray) -> float:
    """Seconds of a pass over so many rows: `Cost.at`."""
    at = 1
    while at + 1 < len(rows) and rows[at] < num:
        at += 1
    slope = (seconds[at] - seconds[at - 1]) / (rows[at] - rows[at - 1])
    return float(seconds[at] + slope * (max(num, rows[0]) - rows[at]))
