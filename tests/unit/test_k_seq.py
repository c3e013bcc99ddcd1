"""k-SEQ: rho, acceptance, residual and law on the sheet's oracles; which drafts it judges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, linprog

from fakes import TableSource, sequence, table_law
from forerun.core.dice import Dice, EnumeratedDice, SeededDice
from forerun.core.records import Plan, Verdict
from forerun.core.sampling import Sampling
from forerun.core.tree import IID, POINT, SWOR, Proposal, Tree, TreeBuilder
from forerun.drafters.base import Grown
from forerun.engine.engine import check_pair
from forerun.errors import ConfigError
from forerun.growers.gumbel import Gumbel
from forerun.growers.iid import Iid
from forerun.verifiers.base import residual as after_rejection
from forerun.verifiers.k_seq import KSeq, Rule, division_factor, k_seq, residual

A = (np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), 2)
B = (np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4]), 2)
C = (*B[:2], 3)
D = (np.array([0.6, 0.2, 0.1, 0.05, 0.05]), np.array([0.35, 0.3, 0.2, 0.1, 0.05]), 2)

# rho*, beta, acceptance, and the best that any rule reaches with i.i.d. drafts
ORACLES = [
    (A, 1.456776436283, 0.543223563717, 0.791355287257, 0.86),
    (B, 1.5, 0.5, 0.75, 0.79),
    (C, 1.939499683078, 0.409358132530, 0.793949968308, 0.871),
    (D, 1.354740502510, 0.645259497490, 0.874159175879, 0.9775),
]


class OnePosition(dict):
    """The same law at the root and below every child."""

    sampling = Sampling()

    def __init__(self, p: np.ndarray) -> None:
        super().__init__(dict.fromkeys(range(-1, 16), p))


def whole(p: np.ndarray, q: np.ndarray, rule: Rule) -> np.ndarray:
    """The residual, normalised, for a q with full support."""
    left = residual(p, np.arange(len(p)), p, q, rule)
    return left / left.sum()


def siblings(q: np.ndarray, k: int, dice: Dice) -> Tree:
    tree, proposal = TreeBuilder(), Proposal.of(q)
    for _ in range(k):
        tree.add(int(proposal.ids[dice.choice(proposal.probs)]), -1, IID, proposal)
    return tree.build()


def with_replacement(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """Acceptance of recursive rejection: 1 - prod (1 - a_i)."""
    failed = 1.0
    for _ in range(k):
        failed *= 1 - np.minimum(p, q).sum()
        p = after_rejection(p, q)
    return 1 - failed


def optimum(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """1 + min over sets H of p(H) - q(H)^k: the best acceptance with k i.i.d. drafts."""
    subsets = itertools.product((0.0, 1.0), repeat=len(p))
    return 1 + min(float(np.dot(h, p) - np.dot(h, q) ** k) for h in map(np.array, subsets))


def linear_program(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The same optimum as a transport from draft tuples to tokens."""
    tuples = list(itertools.product(range(len(p)), repeat=k))
    pairs = [(t, y) for t in range(len(tuples)) for y in sorted(set(tuples[t]))]
    rows = np.zeros((len(tuples) + len(p), len(pairs)))
    for column, (t, y) in enumerate(pairs):
        rows[t, column] = rows[len(tuples) + y, column] = 1.0
    limits = [float(np.prod(q[list(t)])) for t in tuples] + list(p)
    return -linprog(-np.ones(len(pairs)), A_ub=rows, b_ub=limits).fun


@pytest.mark.parametrize(("case", "rho", "beta", "accepted", "best"), ORACLES)
def test_oracles(case, rho, beta, accepted, best) -> None:
    rule = k_seq(*case)
    assert rule.rho == pytest.approx(rho, abs=1e-9)
    assert rule.beta == pytest.approx(beta, abs=1e-9)
    assert rule.accepted == pytest.approx(accepted, abs=1e-9)
    assert optimum(*case) == pytest.approx(best, abs=1e-9)
    assert linear_program(*case) == pytest.approx(best, abs=1e-9)


def test_residuals_of_the_oracles() -> None:
    np.testing.assert_allclose(whole(*A[:2], k_seq(*A)), [1, 0, 0], atol=1e-9)
    np.testing.assert_allclose(whole(*B[:2], k_seq(*B)), [1, 0, 0, 0], atol=1e-9)


def test_rho_of_k_is_valid_and_worse() -> None:
    rule = k_seq(*A, rho=2.0)
    assert (rule.beta, rule.accepted) == pytest.approx((0.45, 0.6975), abs=1e-12)
    np.testing.assert_allclose(whole(*A[:2], rule), [0.628099, 0.223140, 0.148760], atol=1e-6)
    rule = k_seq(*C, rho=3.0)
    assert (rule.beta, rule.accepted) == pytest.approx((0.3, 0.657), abs=1e-12)


LAWS = st.tuples(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from([1, 2, 3, 4, 8]))


def random_case(seed: int, vocab: int, k: int) -> tuple[np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(vocab, 0.7), 2)
    if seed % 3 == 0:  # a token that only one of them has
        p[0], q[-1] = 0.0, 0.0
    return p / p.sum(), q / q.sum(), k


@settings(deadline=None, max_examples=200)
@given(LAWS, st.floats(0, 1))
def test_output_law_for_every_valid_rho(case, share) -> None:
    p, q, k = random_case(*case)
    on = q > 0
    best = division_factor(p[on], q[on], k)
    rule = k_seq(p[on], q[on], k, rho=best + share * (k - best))
    left = residual(p, np.flatnonzero(on), p[on], q[on], rule)
    paid = np.zeros(len(p))
    if rule.beta > 0:
        paid[on] = np.minimum(q[on], p[on] / rule.rho) * rule.accepted / rule.beta
        assert rule.accepted <= rule.rho * rule.beta + 1e-12
    law = paid + (1 - rule.accepted) * left / left.sum()
    np.testing.assert_allclose(law, p, atol=1e-9 if rule.accepted > 1 - 1e-9 else 1e-12)


@settings(deadline=None, max_examples=200)
@given(LAWS)
@example((3911, 2, 8))  # f is flat: it falls with the eighth power of a hundredth
def test_rho_is_the_root_from_above(case) -> None:
    p, q, k = random_case(*case)
    on = q > 0
    p, q = p[on], q[on]

    def f(rho: float) -> float:
        beta = np.minimum(q, p / rho).sum()
        return 1 - (1 - beta) ** k - rho * beta

    found = division_factor(p, q, k)
    assert 1 <= found <= k
    if k > 1 and p.sum() > 1e-9 and f(1.0) > 1e-12 and f(float(k)) < 0:
        root = brentq(f, 1, k, xtol=1e-13)
        assert found == pytest.approx(root, abs=1e-9) or abs(f(found) - f(root)) <= 1e-14
        assert f(found) <= 1e-15


def test_one_draft_and_equal_laws_need_no_division() -> None:
    for p, q, _ in (A, B, D):
        rule = k_seq(p, q, 1)
        assert rule.rho == 1.0
        assert rule.accepted == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)
    rule = k_seq(A[0], A[0], 4)
    assert rule.rho == pytest.approx(1.0, abs=1e-9) and rule.accepted == pytest.approx(1.0)


def test_no_overlap() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.0, 1.0])
    rule = k_seq(p[2:], q[2:], 3)
    assert rule.beta == rule.accepted == 0.0
    np.testing.assert_allclose(residual(p, np.array([2]), p[2:], q[2:], rule), p)


def test_between_recursive_rejection_and_the_optimum() -> None:
    """On 300 random instances. Ratio to the optimum when written: at the least .867."""
    rng, ratios = np.random.default_rng(0), {2: [], 3: []}
    for i in range(300):
        vocab, k = int(rng.integers(2, 6)), 2 + i % 2
        p, q = rng.dirichlet(np.full(vocab, 0.7), 2)
        rule, best = k_seq(p, q, k), optimum(p, q, k)
        assert with_replacement(p, q, k) <= rule.accepted + 1e-9
        assert rule.accepted <= best + 1e-9
        ratios[k].append(rule.accepted / best)
    for k, guarantee in ((2, 0.75), (3, 1 - (2 / 3) ** 3)):
        print(f"k = {k}: least {min(ratios[k]):.3f}, mean {np.mean(ratios[k]):.3f}")
        assert guarantee < 0.85 <= min(ratios[k])


def outcomes(p: np.ndarray, draw, verifier: KSeq) -> list[tuple[Tree, Verdict, float]]:
    def program(dice: EnumeratedDice) -> tuple[Tree, Verdict]:
        tree = draw(dice)
        return tree, verifier.verify(tree, OnePosition(p), dice)

    return [(*found, weight) for found, weight in EnumeratedDice().outcomes(program)]


@pytest.mark.parametrize(("case", "accepted"), [(row[0], row[3]) for row in ORACLES])
def test_verifier_has_the_law_and_the_acceptance(case, accepted) -> None:
    p, q, k = case
    law, kept = np.zeros(len(p)), 0.0
    for tree, verdict, weight in outcomes(p, lambda dice: siblings(q, k, dice), KSeq()):
        law[verdict.tokens(tree)[0]] += weight
        kept += weight * bool(verdict.nodes)
    np.testing.assert_allclose(law, p, atol=1e-12)
    assert kept == pytest.approx(accepted, abs=1e-9)


def draft(grower, law, dice: Dice, plan: Plan) -> Tree:
    drafter = Grown(TableSource(law), grower)
    return drafter.propose([sequence([0, 1], 9, dice)], [plan], [dice])[0]


@pytest.mark.parametrize("grower", [Iid(width=2), Iid(width=(3,)), Iid(width=(1, 2))])
def test_joint_law_of_two_tokens(grower) -> None:
    """Two levels, the second judged with as many drafts as agree with the first token."""
    target, law = table_law(11), table_law(12)

    class Rows(dict):
        sampling = Sampling()

    def program(dice: Dice) -> tuple[int, ...]:
        tree = draft(grower, law, dice, Plan(6, 2))
        laws = Rows({n: target([0, 1, *tree.path(n)]) for n in range(-1, len(tree))})
        return tuple(KSeq().verify(tree, laws, dice).tokens(tree)[:2])

    found: dict[tuple[int, ...], float] = {}
    for tokens, weight in EnumeratedDice().outcomes(program):
        rest = range(3) if len(tokens) < 2 else tokens[1:]
        for second in rest:
            chance = target([0, 1, *tokens])[second] if len(tokens) < 2 else 1.0
            key = (tokens[0], second)
            found[key] = found.get(key, 0.0) + weight * chance
    assert len(found) == 9
    for (first, second), chance in found.items():
        assert chance == pytest.approx(
            target([0, 1])[first] * target([0, 1, first])[second], abs=1e-12
        )


def test_duplicates_go_on_together() -> None:
    """Two chains that agree on token 0: the second level tries both continuations."""
    q = Proposal.of(np.array([0.5, 0.25, 0.25]))
    tree = TreeBuilder()
    first, second = tree.add(0, -1, IID, q), tree.add(0, -1, IID, q)
    tree.add(1, first, IID, q)
    tree.add(2, second, IID, q)
    rows = OnePosition(np.eye(3)[2])
    rows[-1] = np.eye(3)[0]
    verdict = KSeq().verify(tree.build(), rows, SeededDice(3))
    assert verdict.nodes == [second, 3] and verdict.token == 2  # the path of the accepted leaf


def test_greedy_follows_the_argmax_through_all_chains() -> None:
    q = Proposal.of(np.array([0.5, 0.25, 0.25]))
    tree = TreeBuilder()
    first, second = tree.add(0, -1, IID, q), tree.add(0, -1, IID, q)
    tree.add(2, first, IID, q)
    tree.add(1, second, IID, q)

    class Greedy(OnePosition):
        sampling = Sampling(temperature=0.0)

        def logits(self, node: int) -> np.ndarray:
            return np.array([3.0, 2, 1]) if node < 0 else np.array([1.0, 3, 2])

    dice = SeededDice(0)
    verdict = KSeq().verify(tree.build(), Greedy(np.eye(3)[0]), dice)
    assert verdict == Verdict([second, 3], 1) and dice.uniform() == SeededDice(0).uniform()


def test_a_drafter_of_other_draws_is_refused() -> None:
    drafter = Grown(TableSource(table_law(1)), Gumbel())
    with pytest.raises(ConfigError, match=r"'k_seq' does not accept .* \(swor\)"):
        check_pair(drafter, KSeq())


@pytest.mark.parametrize("law", [POINT, SWOR])
def test_other_nodes_are_refused(law: int) -> None:
    tree = TreeBuilder()
    tree.add(0, -1, law, None if law == POINT else Proposal.of(A[1]))
    with pytest.raises(AssertionError, match="needs iid drafts, but node 0 is"):
        KSeq().verify(tree.build(), OnePosition(A[0]), SeededDice(0))


def test_drafts_from_two_laws_are_refused() -> None:
    tree = TreeBuilder()
    tree.add(0, -1, IID, Proposal.of(A[1]))
    tree.add(0, -1, IID, Proposal.of(A[0]))
    with pytest.raises(AssertionError, match="from one q, but nodes 0 and 1"):
        KSeq().verify(tree.build(), OnePosition(A[0]), SeededDice(0))


# The grower


class Counted(TableSource):
    """Remembers how many paths it was asked for."""

    asked = 0

    def next(self, requests: Many) -> list:
        self.asked += len(requests)
        return super().next(requests)


def test_equal_paths_are_asked_for_once() -> None:
    source = Counted(lambda tokens: np.array([1.0, 0.0, 0.0]))
    dice = SeededDice(0)
    tree = Grown(source, Iid(width=4)).propose([sequence([0, 1], 9, dice)], [Plan(12, 3)], [dice])[
        0
    ]
    assert len(tree) == 12 and source.asked == 3
    assert tree.parents.tolist() == [-1] * 4 + list(range(8))


def test_trees_are_grown_in_whole_levels() -> None:
    dice = SeededDice(0)
    for nodes, size in ((14, 14), (13, 6), (5, 2), (1, 0)):
        tree = draft(Iid(width=(2, 2, 2)), table_law(1), dice, Plan(nodes, 9))
        assert len(tree) == size
    tree = draft(Iid(width=(2, 1)), table_law(1), dice, Plan(9, 1))
    assert tree.parents.tolist() == [-1, -1]


@pytest.mark.parametrize("options", [{"width": 0}, {"width": (2, 0)}, {"width": ()}])
def test_every_node_needs_a_child(options) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Iid(**options)
