"""Optimal acceptance at one position over all verifiers, for a given distribution of the drafts.

Hu et al., "Towards Optimal Multi-draft Speculative Decoding", 2025. A verifier moves the mass of
draft tuples to tokens in them, at most p(x) to token x. This is a flow with the minimum cut

    1 + min over sets H of  p(H) - Q(H),    Q(H) = P(all drafts lie in H).

For drafts from one q, with or without replacement, a prefix of the tokens in falling order of q / p
is a minimiser, found by a sort and a scan. Chosen drafts E are in every tuple: H contains them, or
Q(H) = 0. The bound is for one position, not for the accepted length of several.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from forerun.core.tree import IID, POINT, SWOR, Proposal, Tree
from forerun.errors import ConfigError
from forerun.growers.greedy_mix import most_likely
from forerun.utils.jit import compiled
from forerun.utils.numbers import whole

NUM_POINTS = 16  # Gauss-Legendre points per panel
FIRST_PANEL_END, LAST_PANEL_END = 0.25, 1e60  # times; each panel doubles the end
MAX_SERIES_X = 0.01  # up to here 1 - e^-x is a polynomial
MIN_PROBABILITY, MAX_EXPONENT = 1e-18, 50.0  # beyond, a probability or e^-x changes no digit


def with_replacement(p: np.ndarray, q: np.ndarray, count: int) -> float:
    """The optimum for `count` independent drafts from q [V]: Q(H) = q(H)^count."""
    return best_acceptance(p, q, count, IID)


def without_replacement(p: np.ndarray, q: np.ndarray, count: int) -> float:
    """The optimum for `count` drafts from q [V], each without the tokens before it."""
    return best_acceptance(p, q, count, SWOR)


def greedy(p: np.ndarray, q: np.ndarray, count: int) -> float:
    """p(Top) + sum min(p, norm[q without Top]): the count - 1 most likely tokens and one draw.

    No draft is accepted of none: 0 for count 0.
    """
    if whole("count", count, 0) == 0:
        return best_acceptance(p, q, 0, SWOR)
    drafts = Proposal.of(_normalised("q", q))
    top = drafts.ids[most_likely(drafts, min(count, len(drafts.ids)) - 1)]
    return best_acceptance(p, q, 1, SWOR, tuple(top))


def best_acceptance(
    p: np.ndarray, q: np.ndarray, count: int, law: int, chosen: np.ndarray | tuple[int, ...] = ()
) -> float:
    """The optimum for the tokens `chosen` and `count` drafts from q [V], IID or SWOR.

    Draws without replacement exclude the chosen tokens. p and q need not be normalised. Raises
    ConfigError for distributions and numbers that are none.
    """
    count = whole("count", count, 0)
    p, q = _normalised("p", p), _normalised("q", q)
    if len(p) != len(q):
        raise ConfigError(f"p and q must have one length, got {len(p)} and {len(q)}")
    if law not in (IID, SWOR):
        raise ConfigError(f"law must be IID ({IID}) or SWOR ({SWOR}), got {law!r}")
    is_free = np.ones(len(p), bool)
    is_free[[whole("a chosen token", token, 0, len(p) - 1) for token in chosen]] = False
    if law == SWOR:
        q = np.where(is_free, q, 0.0)
        count = min(count, int(np.count_nonzero(q)))
    base = float(p[~is_free].sum())
    if count < 1:
        return min(1.0, base)
    q = q / q.sum()
    on = np.flatnonzero(is_free & (q > 0))  # a token that is never drafted only adds p to a set
    with np.errstate(divide="ignore"):
        order = on[np.argsort(-q[on] / p[on])]
    wanted = base + np.concatenate([[0.0], np.cumsum(p[order])])
    inside = float(q[~is_free].sum())
    return min(1.0, 1.0 + _lowest(wanted, q[order], inside, count, law))


def for_drafts(tree: Tree, drafts: list[int], p: np.ndarray) -> float | None:
    """The optimum for the drafts of one position with target p [V]; None if unknown.

    Known for chosen drafts, for drafts of one q and one label, and for both together if the draws
    cannot equal a chosen draft that comes after them.
    """
    drawn = [node for node in drafts if tree.laws[node] != POINT]
    points = [node for node in drafts if tree.laws[node] == POINT]
    chosen = tuple(sorted({int(tree.tokens[node]) for node in points}))
    if not drawn:
        return float(best_acceptance(p, p, 0, SWOR, chosen))
    q, proposal = np.zeros(len(p)), tree.q(drawn[0])
    assert proposal is not None, "drawn nodes carry their q"
    q[proposal.ids] = proposal.probs
    is_met = any(q[tree.tokens[node]] > 0 for node in points if node > drawn[0])
    laws = {(int(tree.laws[node]), int(tree.rows[node])) for node in drawn}
    if is_met or len(laws) > 1:
        return None
    return best_acceptance(p, q, len(drawn), int(tree.laws[drawn[0]]), chosen)


def candidates(tree: Tree, node: int) -> list[int]:
    """All drafts of the position after `node`; equal i.i.d. paths count as one position."""
    path, depth = tree.path(node), tree.depths[node] if node >= 0 else 0
    equal = [n for n in np.flatnonzero(tree.depths == depth).tolist() if tree.path(n) == path]
    return sorted(child for n in equal or [-1] for child in tree.children(n))


def _normalised(name: str, law: np.ndarray) -> np.ndarray:
    """A distribution [V] as float64 of sum 1. Raises ConfigError if it is none."""
    wide = np.asarray(law, np.float64)
    if wide.ndim != 1 or not np.isfinite(wide).all() or (wide < 0).any() or not wide.sum() > 0:
        raise ConfigError(
            f"{name} must be a list of finite probabilities of at least 0, not all 0; got "
            f"{law!r:.80}"
        )
    return wide / wide.sum()


def _lowest(wanted: np.ndarray, q: np.ndarray, inside: float, count: int, law: int) -> float:
    """The smallest p(H) - Q(H), 0 for the empty set: H is the first i tokens, wanted[i] its p."""
    if law == IID:
        cut = wanted - (inside + np.concatenate([[0.0], np.cumsum(q)])) ** count
    elif count == 1:
        cut = wanted - np.concatenate([[0.0], np.cumsum(q)])
    elif count == 2:
        cut = wanted - pairs_inside(q)
    else:
        return min(0.0, float(scan(wanted, q, count, pairs_inside(q), *_grid())))
    return min(0.0, float(cut.min()))


def pairs_inside(q: np.ndarray) -> np.ndarray:
    """P(two draws without replacement lie in the first i tokens), [n + 1]; q [n] sums to 1.

    Sum of q(a) q(b) / (1 - q(a)) over a != b. The largest token is summed separately, as 1 - q
    cancels above 1/2.
    """
    big = np.argmax(q)
    rest = q.copy()
    rest[big] = 0.0
    odds = rest / (1.0 - rest)
    s, a, b = (np.concatenate([[0.0], np.cumsum(x)]) for x in (rest, odds, rest * odds))
    with_big = np.zeros(len(q) + 1)
    if s[-1] > 0:
        with_big[big + 1 :] = q[big] * (a[big + 1 :] + s[big + 1 :] / s[-1])
    return s * a - b + with_big


@cache
def _grid() -> tuple[np.ndarray, np.ndarray]:
    """Times t [T] and weights [T] for integrals over all times."""
    ends = [0.0, FIRST_PANEL_END]
    while ends[-1] < LAST_PANEL_END:
        ends.append(2 * ends[-1])
    x, w = np.polynomial.legendre.leggauss(NUM_POINTS)
    low, half = np.array(ends[:-1])[:, None], np.diff(ends)[:, None] / 2
    return (low + half * (x + 1)).ravel(), (half * w).ravel()


@compiled
def scan(
    wanted: np.ndarray,
    q: np.ndarray,
    count: int,
    most: np.ndarray,
    times: np.ndarray,
    weights: np.ndarray,
) -> float:
    """The smallest wanted[i] - Q(first i tokens) for `count` draws without replacement.

    Tokens arrive at independent Exp(q) times and the first ones are the drafts. The first token
    outside H arrives at an Exp(l) time, l = 1 - q(H), so 1 - Q(H) is the integral of
    l e^(-l t) P(fewer than `count` of H arrived by t). few[t, j] is the probability of j.
    most [n + 1] is an upper bound of Q; prefixes that cannot beat the best are not integrated.
    """
    size, best = len(q), 0.0
    bound, left = np.empty(size + 1), np.empty(size + 1)  # of all later prefixes; 1 - q(H)
    bound[size], left[size] = wanted[size] - most[size], 0.0
    for i in range(size - 1, -1, -1):
        bound[i] = min(bound[i + 1], wanted[i] - most[i])
        left[i] = left[i + 1] + q[i]
    few = np.zeros((len(times), count))
    few[:, 0] = 1.0
    alive = len(times)  # at later times enough of H have arrived
    for i in range(1, size + 1):
        if bound[i] >= best:
            break
        alive = arrive(few, q[i - 1], times, alive)
        if i >= count and wanted[i] - most[i] < best:
            best = min(best, wanted[i] - inside(few, left[i], times, weights, alive))
    return best


@compiled
def arrive(few: np.ndarray, rate: float, times: np.ndarray, alive: int) -> int:
    """Adds a token that has arrived by time t with probability 1 - e^(-rate t)."""
    for i in range(alive):
        x = rate * times[i]
        if x < MAX_SERIES_X:
            has = x * (1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5))))
        else:
            has = 1.0 - math.exp(-x)
        for j in range(few.shape[1] - 1, 0, -1):
            few[i, j] += has * (few[i, j - 1] - few[i, j])
        few[i, 0] *= 1.0 - has
    while alive > 0 and few[alive - 1].sum() < MIN_PROBABILITY:
        alive -= 1
    return alive


@compiled
def inside(
    few: np.ndarray, left: float, times: np.ndarray, weights: np.ndarray, alive: int
) -> float:
    """Q(H), where `left` is 1 - q(H)."""
    outside = 0.0
    for i in range(alive):
        if left * times[i] > MAX_EXPONENT:
            break
        fewer = 0.0
        for j in range(few.shape[1]):
            fewer += few[i, j]
        outside += weights[i] * left * math.exp(-left * times[i]) * fewer
    return 1.0 - outside
