"""Acceptance estimates per node, and the choice of tree sizes; compiled."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from forerun.utils.jit import compiled

if TYPE_CHECKING:
    from forerun.controllers._acceptance import Acceptance
    from forerun.core.cost import Cost

RECENT = 0.25  # weight of a node in the running mean of rates that the next prior uses
PRIOR_TRIALS = 4.0  # trials that the prior of a node counts for


@compiled
def node_estimates(
    counts: np.ndarray, weight: float, first: float, below: float, found: np.ndarray
) -> None:
    """Writes [3, N + 1]: acceptance of node i; probability that a draft has node i; expected
    accepted nodes of a draft of i nodes.

    counts [3, N + 1]: drafts with i allowed nodes; with i nodes; with node i accepted. `weight` is
    that of the next draft. first, below: prior acceptance of the first node, and of a node below an
    accepted one. The prior of a later node is a running mean of the rates before it times `below`:
    one node without hits says little of the next, which may be another branch.
    """
    num = counts.shape[1] - 1
    found[:] = 0.0
    allowed = tries = 0.0
    for i in range(num - 1, -1, -1):  # a draft of more nodes includes node i
        allowed += counts[0, i + 1] / weight
        tries += counts[1, i + 1] / weight
        found[0, i] = tries
        found[1, i] = (tries + PRIOR_TRIALS) / (allowed + PRIOR_TRIALS)
    recent = first / below
    for i in range(num):
        hits = counts[2, i] / weight + PRIOR_TRIALS * below * recent
        rate = hits / (found[0, i] + PRIOR_TRIALS)
        recent = rate if i == 0 else (1 - RECENT) * recent + RECENT * rate
        found[0, i] = rate
        found[2, i + 1] = found[2, i] + rate
        if i:
            found[1, i] = min(found[1, i], found[1, i - 1])


def best_sizes(
    parts: Many[tuple[float, Acceptance]], cost: Cost, num: int, roots: int, margin: float
) -> tuple[list[int], float, float]:
    """Nodes of each sequence, seconds per further row, and tokens per second; see `choose`.

    parts: for each sequence its acceptance factor, and the counts of its drafter.
    """
    if not parts:
        return [], 0.0, 0.0
    prices = [(factor, cost.per_draft + a.per_draft, a.per_node) for factor, a in parts]
    sizes, per_row, speed = choose(
        np.array([acceptance.estimates for _, acceptance in parts]),
        np.array(prices),
        num,
        roots,
        np.array(cost.rows, float),
        np.array(cost.seconds),
        cost.overhead(num, 1) - cost.per_draft,
        num / (cost.pass_time(roots) + cost.overhead(num, 0)),
        margin,
    )
    return sizes.tolist(), per_row, speed


@compiled
def choose(
    estimates: np.ndarray,
    prices: np.ndarray,
    num: int,
    roots: int,
    rows: np.ndarray,
    seconds: np.ndarray,
    overhead: float,
    plain: float,
    margin: float,
) -> tuple[np.ndarray, float, float]:
    """Nodes of each of S sequences [S], seconds per further row, and tokens per second.

    Takes the most probable nodes of all sequences, as many as maximise tokens per second; none if
    drafting is slower with `margin` fewer tokens than expected.

    estimates [S, 3, N + 1]: see `node_estimates`. prices [S, 3]: acceptance factor of a sequence,
    seconds per draft and per node. num: sequences of the step, at least S. roots: rows of a pass
    without drafts. rows, seconds: of `Cost`. overhead: seconds of a step with drafts, without its
    pass. plain: tokens per second without drafts.
    """
    size, nodes = len(estimates), estimates.shape[2] - 1
    ranks = np.empty(size * nodes)  # minus the acceptance of each node and its ancestors
    for s in range(size):
        least = np.inf
        for i in range(nodes):
            least = min(least, estimates[s, 0, i])
            ranks[s * nodes + i] = -prices[s, 0] * least
    order = np.argsort(ranks, kind="mergesort")
    # of the nodes so far: expected tokens and drafting seconds
    expected = drafting = best_speed = best_expected = best_rows = best_pass = 0.0
    made, taken = float(roots), 0  # expected rows; nodes of the best choice
    for k in range(len(order)):
        s, i = order[k] // nodes, order[k] % nodes
        present = estimates[s, 1, i]  # probability that the draft has this node
        made += present
        expected += prices[s, 0] * present * estimates[s, 0, i]
        drafting += present * prices[s, 2] + (prices[s, 1] if i == 0 else 0.0)
        whole = _pass(made, rows, seconds)
        speed = (num + expected) / (whole + drafting + overhead)
        if speed > best_speed:
            best_speed, best_expected, best_rows, best_pass = speed, expected, made, whole
            taken = k + 1
    sizes = np.zeros(size, np.int64)
    if (num + (1 - margin) * best_expected) * best_speed <= plain * (num + best_expected):
        return sizes, 0.0, 0.0
    firsts = roots
    for k in range(taken):
        sizes[order[k] // nodes] += 1
        firsts += order[k] % nodes == 0
    more = best_pass - _pass(float(firsts), rows, seconds)
    return sizes, more / max(best_rows - firsts, 1.0), best_speed


@compiled
def _pass(num: float, rows: np.ndarray, seconds: np.ndarray) -> float:
    """`Cost.at`: seconds of a pass over `num` rows."""
    at = 1
    while at + 1 < len(rows) and rows[at] < num:
        at += 1
    slope = (seconds[at] - seconds[at - 1]) / (rows[at] - rows[at - 1])
    return float(seconds[at] + slope * (max(num, rows[0]) - rows[at]))
