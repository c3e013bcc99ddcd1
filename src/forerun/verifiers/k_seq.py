"""k-SEQ: k i.i.d. drafts tried in turn against p / rho, with the smallest valid rho.

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", 2023. Each of k drafts from q
is accepted with probability min(1, p / (rho q)), so P(any is accepted) = P = 1 - (1 - beta)^k with
beta = sum min(q, p / rho). If all fail, a token is drawn from the residual
p - min(q, p / rho) P / beta, which is valid exactly if P <= rho beta. rho* is the smallest such
rho, and P(rho*) is at least 1 - 1/e of the best possible. Lossless.

Needs i.i.d. draws. All drafts that agree with the emitted token continue to the next position,
where their number and rho* change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.sampling import argmax
from forerun.core.tree import IID, LAW_NAMES, Proposal, Tree
from forerun.utils.jit import compiled
from forerun.verifiers.base import NO_MASS, check_mass, draft_error, reject_invalid

RHO_PRECISION = 1e-12
MAX_Q_DIFFERENCE = 1e-6  # rounding error between two computations of the same q


class KSeq(Verifier):
    """Searches rho once per visited node with drafts, in O(V) independent of k."""

    judges = frozenset({"iid"})

    def warm_up(self) -> None:
        division_factor(np.ones(1), np.ones(1), 2)

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        alive = [-1]  # nodes of all drafts that agree with the emitted tokens
        while True:
            drafts = [child for node in alive for child in tree.children(node)]
            if laws.sampling.is_greedy:
                token = argmax(laws.logits(alive[0]))
            else:
                p = laws[alive[0]]
                check_mass(float(p.sum()), len(_path(tree, alive[0])))
                if why := iid_error(tree, drafts, len(p)):
                    reject_invalid(why)
                    drafts = []
                token = select(p, tree, drafts, dice) if drafts else dice.choice(p)
            agreeing = [draft for draft in drafts if tree.tokens[draft] == token]
            if not agreeing:
                return Verdict(_path(tree, alive[0]), token)
            alive = agreeing


class Rule(NamedTuple):
    """k-SEQ for one pair p, q."""

    rho: float
    beta: float  # sum min(q, p / rho): P(one draft is accepted)
    accepted: float  # P(any of k drafts is accepted)


def select(p: np.ndarray, tree: Tree, drafts: list[int], dice: Dice) -> int:
    """The emitted token: the first accepted draft, or a draw from the residual."""
    q = tree.q(drafts[0])
    assert q is not None, "i.i.d. nodes carry their q"
    shares = q.probs / q.probs.sum()
    wanted = p[q.ids].astype(np.float64)
    rule = k_seq(wanted, shares, len(drafts))
    for token in tree.tokens[drafts].tolist():
        i = int(np.flatnonzero(q.ids == token)[0])
        if dice.coin(min(1.0, wanted[i] / (rule.rho * shares[i]))):
            return token
    return dice.choice(residual(p, q.ids, wanted, shares, rule))


def k_seq(p: np.ndarray, q: np.ndarray, k: int, rho: float | None = None) -> Rule:
    """The rule for k drafts; p and q on the support of q; any rho in [rho*, k] is valid."""
    rho = division_factor(p, q, k) if rho is None else rho
    beta = float(np.minimum(q, p / rho).sum())
    return Rule(rho, beta, 1.0 - (1.0 - beta) ** k)


def residual(
    p: np.ndarray, ids: np.ndarray, wanted: np.ndarray, shares: np.ndarray, rule: Rule
) -> np.ndarray:
    """The residual of p [V] after k rejections, not normalised; p if those have probability 0."""
    left = p.astype(np.float64)
    if rule.beta > 0:
        covered = np.minimum(shares, wanted / rule.rho) * (rule.accepted / rule.beta)
        left[ids] = np.maximum(wanted - covered, 0.0)
    return left if left.sum() > NO_MASS else p


@compiled
def division_factor(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """rho*: the root of f(rho) = 1 - (1 - beta)^k - rho beta on [1, k], from above.

    p and q [n] are given on the support of q. Bisection, as f is decreasing. A token with p / q
    outside the bracket stays on its side of min(q, p / rho), so only the others are summed again.
    """
    low, high = 1.0, float(k)
    inside_p, inside_q, n = p.copy(), q.copy(), len(p)
    capped = part = 0.0  # sums of q and p over tokens outside the bracket
    rho = low
    while True:
        beta = capped + part / rho
        for i in range(n):
            beta += min(inside_q[i], inside_p[i] / rho)
        if 1.0 - (1.0 - min(beta, 1.0)) ** k <= rho * beta:
            if rho == 1.0:
                return rho  # k = 1, or p = q
            high = rho
        else:
            low = rho
        kept = 0
        for i in range(n):
            if inside_p[i] >= high * inside_q[i]:
                capped += inside_q[i]
            elif inside_p[i] <= low * inside_q[i]:
                part += inside_p[i]
            else:
                inside_p[kept], inside_q[kept] = inside_p[i], inside_q[i]
                kept += 1
        n = kept
        if high - low <= RHO_PRECISION:
            return high
        rho = 0.5 * (low + high)


def iid_error(tree: Tree, drafts: list[int], vocab: int) -> str | None:
    """Why the drafts are not i.i.d. draws from one q; None if they are."""
    checked: set[tuple[int, int]] = set()
    for node in drafts:
        if tree.laws[node] != IID:
            law = next(name for name, number in LAW_NAMES.items() if number == tree.laws[node])
            return f"k_seq needs iid drafts, but node {node} is {law!r}; use grower 'iid'"
        row, token = int(tree.rows[node]), int(tree.tokens[node])
        if (row, token) not in checked and (why := draft_error(tree, node, vocab)):
            return why
        if row != tree.rows[drafts[0]] and not is_same(tree.q(node), tree.q(drafts[0])):
            return f"k_seq needs drafts from one q, but nodes {drafts[0]} and {node} differ"
        checked.add((row, token))
    return None


def is_same(one: Proposal | None, other: Proposal | None) -> bool:
    """Whether two proposals are equal up to rounding."""
    if one is None or other is None or not np.array_equal(one.ids, other.ids):
        return False
    return bool(np.abs(one.probs - other.probs).max() <= MAX_Q_DIFFERENCE)


def _path(tree: Tree, node: int) -> list[int]:
    """Nodes from below the root down to `node`."""
    nodes: list[int] = []
    while node >= 0:
        nodes.append(node)
        node = int(tree.parents[node])
    return nodes[::-1]
