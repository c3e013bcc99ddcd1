"""RSD (arXiv 2402.14160): trees without replacement against i.i.d. trees of the same shape.

A synthetic pair (noisy_pair), 3000 tokens per case. When written, tokens per pass, +- .05:

| T | budget | chain of it | chain as deep | i.i.d. | RSD-C | RSD-S |
| .3 | 6 | 2.04 | 1.81 | 1.96 | 2.14 | 2.21 |
| .3 | 14 | 2.18 | 1.92 | 2.14 | 2.45 | 2.73 |
| 1 | 6 | 3.21 | 2.24 | 2.40 | 2.46 | 2.47 |
| 1 | 14 | 3.62 | 2.57 | 2.90 | 2.98 | 2.98 |

The honest reading of the sheet holds: where a draft token is likely to be accepted, the chain of
as many tokens is ahead of every tree in tokens per pass; it needs as many draft passes, though.
Draws and acceptance are compared with the laws and numbers of the sheet, with the kernels that run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence as Many
from functools import cache

import numpy as np
import pytest
import torch
from noisy_pair import Pair, error, run

from fakes import TableSource, sequence
from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Plan, Rows
from forerun.core.tree import Tree
from forerun.drafters.base import grow

pytestmark = pytest.mark.paper

TEMPERATURES = (0.3, 1.0)
SHAPES = {6: ("2+2", 2), 14: ("2+2+2", 3)}  # budget -> branching, depth
BEAMS = {6: (3, 2), 14: (5, 3)}  # budget -> width, depth: the same depth, as many nodes or less

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
BY_LAST = np.array([[0.6, 0.3, 0.1], [0.2, 0.1, 0.7], [0.3, 0.4, 0.3]])  # q after each token
ROOT = 1


def drawn(grower: str, plan: Plan, dice: SeededDice, law=lambda tokens: Q) -> Tree:
    seq = sequence([ROOT], 9, dice)
    return grow([seq], [plan], [dice], TableSource(law), registry.make("grower", grower))[0]


def by_last(tokens: Many[int]) -> np.ndarray:
    return BY_LAST[tokens[-1]]


def pairs_without_replacement(law: dict) -> dict:
    """P(first, second) of two draws without replacement."""
    return {(a, b): law[a] * law[b] / (1 - law[a]) for a, b in itertools.permutations(law, 2)}


def distance(seen: Counter, law: dict) -> float:
    """Chi-square over its degrees of freedom, and over the .999 quantile's rough size: below 1."""
    runs = seen.total()
    assert set(seen) <= set(law)
    chi = sum((seen[k] - runs * p) ** 2 / (runs * p) for k, p in law.items())
    freedom = len(law) - 1
    return chi / (freedom + 3.5 * (2 * freedom) ** 0.5 + 4)


def test_siblings_of_constant_branching_are_sequential_draws() -> None:
    """RSD-C: in the order drawn, at the root and below its first child."""
    dice, above, below = SeededDice(3), Counter(), Counter()
    for _ in range(5000):
        tree = drawn("gumbel:branching=2+2", Plan(6, 2), dice, by_last)
        assert np.bincount(tree.depths).tolist() == [0, 2, 4]
        above[tuple(tree.tokens[tree.children(-1)].tolist())] += 1
        first = tree.children(-1)[0]
        below[(int(tree.tokens[first]), *tree.tokens[tree.children(first)].tolist())] += 1
    q = dict(enumerate(BY_LAST[ROOT]))
    assert distance(above, pairs_without_replacement(q)) < 1
    law = {
        (a, *pair): q[a] * p
        for a in q
        for pair, p in pairs_without_replacement(dict(enumerate(BY_LAST[a]))).items()
    }
    assert distance(below, law) < 1


def test_a_beam_holds_whole_paths_drawn_without_replacement() -> None:
    """RSD-S of width 2: both levels, in order, are two draws from the law of their paths."""
    dice, levels = SeededDice(4), (Counter(), Counter())
    for _ in range(5000):
        tree = drawn("stochastic_beam:width=2", Plan(4, 2), dice, by_last)
        for level, seen in enumerate(levels):
            nodes = np.flatnonzero(tree.depths == level + 1).tolist()
            seen[tuple(tuple(tree.path(node)) for node in nodes)] += 1
    q = BY_LAST[ROOT]
    one = {(a,): q[a] for a in range(3)}
    two = {(a, b): q[a] * BY_LAST[a, b] for a in range(3) for b in range(3)}
    for seen, law in zip(levels, (one, two), strict=True):
        assert distance(seen, pairs_without_replacement(law)) < 1


ACCEPTED = {  # grower -> plan, accepted drafts of the sheet; RSD-S by enumeration
    "chain": (Plan(4, 4), 1.7731),
    "iid:width=2+2": (Plan(6, 2), 1.3376),
    "gumbel:branching=2": (Plan(2, 1), 0.82),
    "gumbel:branching=2+1": (Plan(4, 2), 1.394),
    "gumbel:branching=2+2": (Plan(6, 2), 1.4924),
    "gumbel:branching=3+1": (Plan(6, 2), 1.7),
    "stochastic_beam:width=2": (Plan(4, 2), 1.379176),
}


@pytest.mark.parametrize(
    ("verifier", "grower"),
    [*(("speculative", grower) for grower in ACCEPTED), ("recursive", "gumbel:branching=2+2")],
)
def test_accepted_drafts_of_the_sheet(verifier: str, grower: str) -> None:
    """Within 5 standard errors; and the first two tokens have the target's law."""
    (plan, expected), rule = ACCEPTED[grower], registry.make("verifier", verifier)
    dice, counts, pairs = SeededDice(6), [], Counter()
    for _ in range(4000):
        tree = drawn(grower, plan, dice)
        logits = torch.from_numpy(np.log(np.tile(P, (len(tree) + 1, 1)))).float()
        laws = TargetProbs(Rows(logits), sequence([ROOT], 9, dice), tree, ())
        verdict = rule.verify(tree, laws, dice)
        counts.append(len(verdict.nodes))
        pairs[tuple([*verdict.tokens(tree), dice.choice(P)][:2])] += 1
    assert abs(np.mean(counts) - expected) < 5 * np.std(counts) / len(counts) ** 0.5
    assert distance(pairs, {(a, b): P[a] * P[b] for a in range(3) for b in range(3)}) < 1


FAR_P, FAR_Q = np.array([0.1, 0.3, 0.55, 0.05]), np.array([0.6, 0.2, 0.15, 0.05])


def accepted(p: np.ndarray, q: np.ndarray, count: int) -> float:
    """Chance that one of `count` siblings is accepted: q loses the tried token, p loses q."""
    if count == 0:
        return 0.0
    q, total = q / q.sum(), 0.0
    for x in np.flatnonzero(q):
        rate, left = min(1.0, p[x] / q[x]), np.maximum(p - q, 0.0)
        total += q[x] * rate
        if rate < 1:
            rest = np.where(np.arange(len(q)) == x, 0.0, q)
            total += q[x] * (1 - rate) * accepted(left / left.sum(), rest, count - 1)
    return total


@pytest.mark.parametrize("verifier", ["speculative", "recursive"])
@pytest.mark.parametrize("grower", ["gumbel:branching=2", "stochastic_beam:width=2"])
def test_what_was_tried_is_taken_out_of_q(verifier: str, grower: str) -> None:
    """Where q is far from p: with a q that keeps the tried token, .94 instead of .79 are kept."""
    dice, rule, tokens = SeededDice(7), registry.make("verifier", verifier), Counter()
    expected, runs, kept = accepted(FAR_P, FAR_Q, 2), 4000, 0
    assert expected == pytest.approx(0.7875) and accepted(P, Q, 2) == pytest.approx(0.808571)
    for _ in range(runs):
        tree = drawn(grower, Plan(2, 1), dice, lambda tokens: FAR_Q)
        logits = torch.from_numpy(np.log(np.tile(FAR_P, (3, 1)))).float()
        laws = TargetProbs(Rows(logits), sequence([ROOT], 9, dice), tree, ())
        verdict = rule.verify(tree, laws, dice)
        kept += len(verdict.nodes)
        tokens[verdict.tokens(tree)[0]] += 1
    assert abs(kept / runs - expected) < 5 * (expected * (1 - expected) / runs) ** 0.5
    assert distance(tokens, dict(enumerate(FAR_P))) < 1


@cache
def taus(temperature: float, budget: int) -> dict[str, float]:
    """Tokens per pass by kind of draft."""
    branching, depth = SHAPES[budget]
    cases = {
        "chain": ("chain", budget),
        "short chain": ("chain", depth),
        "i.i.d.": (f"iid:width={branching}", depth),
        "RSD-C": (f"gumbel:branching={branching}", depth),
        "RSD-S": (f"stochastic_beam:width={BEAMS[budget][0]}", BEAMS[budget][1]),
    }
    pair, results = Pair(5, noise=0.8), {}
    for name, (grower, levels) in cases.items():
        nodes = min(budget, levels) if grower == "chain" else budget
        stats = run(pair, grower, "speculative", nodes=nodes, depth=levels, temperature=temperature)
        results[name] = stats.tau
    shown = ", ".join(f"{name} {tau:.2f}" for name, tau in results.items())
    print(f"T = {temperature}, budget {budget}: {shown}; +- {error(stats, depth):.2f}")
    return results


@pytest.mark.parametrize(
    ("temperature", "budget"),
    [
        (0.3, 6),
        pytest.param(0.3, 14, marks=pytest.mark.slow),
        pytest.param(1.0, 6, marks=pytest.mark.slow),
        pytest.param(1.0, 14, marks=pytest.mark.slow),
    ],
)
def test_without_replacement_is_ahead_of_with(temperature: float, budget: int) -> None:
    tau = taus(temperature, budget)
    assert tau["RSD-C"] > tau["i.i.d."] > tau["short chain"]
    assert tau["RSD-S"] > tau["i.i.d."]
    assert tau["RSD-S"] > 0.97 * tau["RSD-C"]


@pytest.mark.slow
def test_collisions_cost_more_at_low_temperature() -> None:
    """I.i.d. siblings collide where q is peaked: the lead without replacement is larger there."""
    leads = [taus(t, 14)["RSD-C"] / taus(t, 14)["i.i.d."] for t in TEMPERATURES]
    print(f"lead over i.i.d. trees at T = .3 and 1: {leads[0]:.3f}, {leads[1]:.3f}")
    assert leads[0] > leads[1] > 1
