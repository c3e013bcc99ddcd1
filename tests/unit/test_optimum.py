"""The optimal acceptance: against linear programs, all subsets, closed forms and the sheet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fakes import FakeTarget, TableSource, run_all, sequence, table_law
from forerun import registry
from forerun.bench import optimum
from forerun.bench.optimum import (
    best_acceptance,
    candidates,
    for_drafts,
    greedy,
    with_replacement,
    without_replacement,
)
from forerun.bench.theory import Headroom
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.tree import IID, POINT, SWOR, Proposal, TreeBuilder
from forerun.drafters.base import Grown
from forerun.engine.engine import Engine
from forerun.verifiers.base import residual

A = (np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), 2)
B = (np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4]), 2)
C = (*B[:2], 3)
D = (np.array([0.6, 0.2, 0.1, 0.05, 0.05]), np.array([0.35, 0.3, 0.2, 0.1, 0.05]), 2)
SHEET = [  # with replacement, without, greedy drafts
    (A, 0.86, 0.985714285714, 0.9),
    (B, 0.79, 0.834523809524, 0.766666666667),
    (C, 0.871, 1.0, 0.933333333333),
    (D, 0.9775, 1.0, 1.0),
]
Law = Mapping[tuple[int, ...], float]  # of draft tuples


def independent(q: np.ndarray, count: int) -> Law:
    tuples = itertools.product(range(len(q)), repeat=count)
    return {t: float(np.prod(q[list(t)])) for t in tuples}


def sequential(q: np.ndarray, count: int) -> Law:
    """Draws without replacement; what is left is summed anew, so that nothing cancels."""
    law = {}
    for t in itertools.permutations(range(len(q)), count):
        chance, rest = 1.0, list(range(len(q)))
        for x in t:
            chance *= q[x] / q[rest].sum() if q[x] > 0 else 0.0
            rest.remove(x)
        law[t] = chance
    return law


def mixed(q: np.ndarray, count: int) -> Law:
    """The likeliest tokens and one drawn from the others."""
    top = tuple(sorted(range(len(q)), key=lambda x: (-q[x], x))[: count - 1])
    rest = q.copy()
    rest[list(top)] = 0.0
    return {(*top, x): float(rest[x] / rest.sum()) for x in range(len(q)) if rest[x] > 0}


def linear_program(p: np.ndarray, law: Law) -> float:
    """The largest transport from draft tuples to tokens in them."""
    tuples = list(law)
    pairs = [(t, y) for t in range(len(tuples)) for y in sorted(set(tuples[t]))]
    rows = np.zeros((len(tuples) + len(p), len(pairs)))
    for column, (t, y) in enumerate(pairs):
        rows[t, column] = rows[len(tuples) + y, column] = 1.0
    return -linprog(-np.ones(len(pairs)), A_ub=rows, b_ub=[*law.values(), *p]).fun


def all_subsets(p: np.ndarray, law: Law) -> float:
    tokens = range(len(p))
    subsets = [set(h) for n in range(len(p) + 1) for h in itertools.combinations(tokens, n)]
    return 1 + min(
        float(p[list(h)].sum()) - sum(chance for t, chance in law.items() if h.issuperset(t))
        for h in subsets
    )


RULES = [(with_replacement, independent), (without_replacement, sequential), (greedy, mixed)]


@pytest.mark.parametrize(("case", "with_", "without", "mix"), SHEET)
def test_sheet(case, with_, without, mix) -> None:
    for (rule, law), expected in zip(RULES, (with_, without, mix), strict=True):
        assert rule(*case) == pytest.approx(expected, abs=1e-9)
        assert linear_program(case[0], law(*case[1:])) == pytest.approx(expected, abs=1e-9)


def test_worked_example() -> None:
    """A at H = {1, 2}: p(H) = .5, Q = .64 with replacement, S A - B = .514286 without."""
    q, h = A[1], [1, 2]
    s, a, b = q[h].sum(), (q / (1 - q))[h].sum(), (q * q / (1 - q))[h].sum()
    assert (s, a, b) == pytest.approx((0.8, 1.428571, 0.628571), abs=1e-6)
    inside = optimum.pairs_inside(q[[2, 1, 0]])[2]
    assert inside == pytest.approx(s * a - b, abs=1e-12)
    assert 1 + 0.5 - inside == pytest.approx(without_replacement(*A), abs=1e-12)


CASES = st.tuples(st.integers(0, 10**6), st.integers(3, 6), st.integers(1, 3))


def random_case(seed: int, vocab: int, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Flat laws, peaked ones down to probabilities of 1e-18, and ones with zeros."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(vocab, [0.7, 0.1][seed % 2]), 2)
    if seed % 5 == 0:
        p[0] = q[-1] = 0.0
    return p / p.sum(), q / q.sum(), count


@settings(deadline=None, max_examples=150)
@given(CASES)
@example((87, 5, 3))  # the third draft is one of three tokens of 1e-13
def test_every_subset(case) -> None:
    p, q, count = random_case(*case)
    count = min(count, int(np.count_nonzero(q)))
    for rule, law in RULES:
        assert rule(p, q, count) == pytest.approx(all_subsets(p, law(q, count)), abs=1e-12)


@settings(deadline=None, max_examples=100)
@given(st.tuples(st.integers(0, 10**6), st.integers(3, 40), st.integers(1, 6)))
def test_order_of_the_optima(case) -> None:
    p, q, count = random_case(*case)
    one, drawn = np.minimum(p, q).sum(), with_replacement(p, q, count)
    assert one - 1e-12 <= drawn <= without_replacement(p, q, count) + 1e-12 <= 1 + 2e-12
    assert with_replacement(p, q, count + 1) >= drawn - 1e-12
    if count == 1:
        for rule in (with_replacement, without_replacement, greedy):
            assert rule(p, q, 1) == pytest.approx(one, abs=1e-12)


def test_recursive_rejection_and_k_seq_stay_below() -> None:
    """300 random instances; greedy drafts beat the optimum of others in some, see the sheet."""
    from forerun.verifiers.k_seq import k_seq

    rng, wins = np.random.default_rng(0), np.zeros(2, int)
    for i in range(300):
        p, q = rng.dirichlet(np.full(int(rng.integers(2, 6)), 0.7), 2)
        count, r, failed = 2 + i % 2, p, 1.0
        best = with_replacement(p, q, count), without_replacement(p, q, count)
        for _ in range(count):
            failed *= 1 - np.minimum(r, q).sum()
            r = residual(r, q)
        assert 1 - failed <= k_seq(p, q, count).accepted + 1e-9 <= best[0] + 2e-9
        wins += [greedy(p, q, count) > b + 1e-12 for b in best]
    print(f"greedy above the optimum with replacement {wins[0]}, without {wins[1]} of 300 times")
    assert wins[0] > 150 > 30 > wins[1]


def noisy(vocab: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = 2.5 * rng.normal(size=vocab)
    both = np.exp([logits, logits + rng.normal(size=vocab)])
    return tuple(both / both.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("vocab", [4, 100, 1000])
def test_integral_agrees_with_the_closed_form_of_two(vocab: int) -> None:
    p, q = noisy(vocab)
    order = np.argsort(-q / p)
    q, wanted = q[order], np.concatenate([[0.0], np.cumsum(p[order])])
    pairs = optimum.pairs_inside(q)
    found = optimum.scan(wanted, q, 2, pairs, *optimum._grid())
    assert found == pytest.approx((wanted - pairs).min(), abs=1e-12)


def test_a_token_that_is_nearly_certain() -> None:
    """1 - q cancels at such a token; the rest of q is what decides."""
    for tiny in (1e-3, 1e-9, 1e-15):
        p, q = np.array([0.0, 0.9, 0.1]), np.array([1 - tiny, 0.75 * tiny, 0.25 * tiny])
        assert without_replacement(p, q, 2) == pytest.approx(0.75 + 0.1, abs=2 * tiny + 1e-12)
        best = all_subsets(p, sequential(q, 2))
        assert without_replacement(p, q, 2) == pytest.approx(best, abs=1e-12)


def test_fewer_tokens_than_drafts() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.0, 0.4, 0.6])
    assert without_replacement(p, q, 3) == greedy(p, q, 3) == pytest.approx(0.5, abs=1e-12)
    assert with_replacement(p, q, 3) == pytest.approx(0.5, abs=1e-12)  # H = {0}: Q = 0
    assert best_acceptance(p, q, 2, SWOR, (1, 2)) == pytest.approx(0.5)  # nothing is left to draw


def test_float_rows_and_unnormalised_laws() -> None:
    p, q, count = D
    assert with_replacement(np.float32(3 * p), np.float32(q), count) == pytest.approx(
        0.9775, abs=1e-6
    )


# Drafts of a tree


def test_drafts_of_a_tree() -> None:
    p, q, other = A[0], Proposal.of(A[1]), Proposal.of(A[0])
    cases = [
        ([(2, POINT, None), (0, POINT, None)], 0.7),
        ([(1, IID, q), (1, IID, q)], 0.86),
        ([(1, SWOR, q), (2, SWOR, q)], 0.985714285714),
        ([(2, POINT, None), (1, SWOR, q)], 0.9),  # q without 2, so greedy drafts
        ([(1, SWOR, q), (2, POINT, None)], None),  # 2 could have been drawn, and met
        ([(1, IID, q), (1, IID, other)], None),
        ([(1, IID, q), (2, SWOR, q)], None),
    ]
    for nodes, expected in cases:
        tree = TreeBuilder()
        for token, law, proposal in nodes:
            tree.add(token, -1, law, proposal)
        built = tree.build()
        assert for_drafts(built, candidates(built, -1), p) == (
            None if expected is None else pytest.approx(expected, abs=1e-9)
        )


def test_equal_paths_are_one_position() -> None:
    tree, q = TreeBuilder(), Proposal.of(A[1])
    nodes = [tree.add(1, -1, IID, q) for _ in range(2)] + [tree.add(0, -1, IID, q)]
    for node in nodes:
        tree.add(2, node, IID, q)
    assert candidates(tree.build(), -1) == nodes
    assert candidates(tree.build(), 1) == candidates(tree.build(), 0) == [3, 4]
    assert candidates(tree.build(), 2) == [5]


def test_headroom_of_records() -> None:
    from forerun.bench.results import Record

    record = Record("t", 0, "a", "", "m", 0, 0, 1, 1.0, 1)
    told = {"examined": 4, "accepted": 3, "best": 3.2, "unknown": 1}
    head = Headroom.of([record, replace(record, headroom=told), replace(record, headroom=told)])
    assert (head.acceptance, head.optimum, head.unknown) == (0.75, 0.8, 2)
    assert Headroom.of([record]).optimum is None


@pytest.mark.parametrize(
    ("grower", "verifier", "is_best"),
    [
        ("greedy_mix:branching=2+2", "transport", True),
        ("greedy_mix:branching=2+2", "speculative", True),
        ("chain", "speculative", True),
        ("template", "match", True),
        ("iid:width=2", "k_seq", False),
        ("gumbel:branching=2+2", "speculative", False),
    ],
)
def test_headroom(grower: str, verifier: str, is_best: bool) -> None:
    """Rules that reach the optimum are only as far from it as chance; others lie below."""
    target, draft, vocab = table_law(5, vocab=8), table_law(6, vocab=8), 8
    head = Headroom()
    engine = Engine(
        FakeTarget(target, vocab),
        Grown(TableSource(draft), registry.make("grower", grower)),
        registry.make("verifier", verifier),
        Fixed(nodes=6, depth=2),
        listeners=[head],
    )
    run_all(engine, [sequence([0, 1], 1500, SeededDice(3))])
    assert head.unknown == 0 and head.examined > 500
    error = np.sqrt(head.acceptance * (1 - head.acceptance) / head.examined)
    if is_best:
        assert abs(head.acceptance - head.optimum) < 4 * error
    else:
        assert head.acceptance < head.optimum - error
