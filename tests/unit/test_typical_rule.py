"""Typical acceptance: the rule by hand, the law that it gives instead, and where it is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeRunner, NoRepeats, table_law
from forerun import registry
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, IID, Proposal, Tree, TreeBuilder, chain
from forerun.errors import ConfigError
from forerun.serving.methods import make_verifier
from forerun.verifiers.typical import Typical, best_path, entropy

A = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])


class PathLaws(dict):
    """laws[node] from a law by path, or the same law everywhere."""

    sampling = Sampling()

    def __init__(self, tree: Tree, law) -> None:
        at = law if callable(law) else lambda path: law
        super().__init__({n: np.asarray(at(tuple(tree.path(n)))) for n in range(-1, len(tree))})


def emitted(p: np.ndarray, q: np.ndarray, verifier: Typical) -> np.ndarray:
    """Law of the first emitted token, one draft drawn from q; by enumeration."""

    def program(dice: EnumeratedDice) -> int:
        tree, proposal = TreeBuilder(), Proposal.of(q)
        tree.add(int(proposal.ids[dice.choice(proposal.probs)]), -1, IID, proposal)
        built = tree.build()
        return verifier.verify(built, PathLaws(built, p), dice).tokens(built)[0]

    law = np.zeros(len(p))
    for token, weight in EnumeratedDice().outcomes(program):
        law[token] += weight
    return law


def formula(p: np.ndarray, q: np.ndarray, verifier: Typical) -> np.ndarray:
    typical = p > verifier.threshold(p)
    return np.where(typical, q, 0) + q[~typical].sum() * p


def test_threshold_by_hand():
    p = np.array([0.5, 0.25, 0.25])  # H = 1.5 ln 2, exp(-H) = 2^-1.5
    assert Typical(epsilon=0.5).threshold(p) == pytest.approx(0.3 * 2**-1.5)
    assert Typical().threshold(p) == 0.09
    assert Typical().threshold(np.full(64, 1 / 64)) == pytest.approx(0.3 / 64)  # delta / V
    assert entropy(np.array([0.0, 1.0, 0.0])) == 0.0


def test_the_law_that_comes_out_of_a_is_the_drafts():
    """All three tokens of A are typical, so every draft is kept: distance .3, all that q has."""
    p, q = A
    law = emitted(p, q, Typical())
    np.testing.assert_allclose(law, q, atol=1e-12)
    assert np.abs(law - p).sum() / 2 == pytest.approx(0.3)
    law = emitted(p, q, Typical(epsilon=0.25, delta=1.0))  # token 2 is not typical
    np.testing.assert_allclose(law, [0.45, 0.45, 0.1], atol=1e-12)


laws = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(lambda w: np.array(w) / sum(w))


@given(laws, laws, st.floats(0.01, 0.6), st.floats(0.1, 2.0))
@settings(max_examples=60, deadline=None)
def test_the_law_is_the_formula(p, q, epsilon, delta):
    verifier = Typical(epsilon=epsilon, delta=delta)
    np.testing.assert_allclose(emitted(p, q, verifier), formula(p, q, verifier), atol=1e-12)


def test_without_a_draft_it_is_exact():
    p, tree = A[0], EMPTY
    found = np.zeros(3)
    for verdict, weight in EnumeratedDice().outcomes(
        lambda dice: Typical().verify(tree, PathLaws(tree, p), dice)
    ):
        found[verdict.token] += weight
    np.testing.assert_allclose(found, p, atol=1e-12)


def test_the_longest_kept_path_counts_then_the_likeliest():
    tree = TreeBuilder()
    first, second = tree.add(0, -1), tree.add(1, -1)
    tree.add(2, first)  # 2 is not typical after 0
    deep = tree.add(1, second)
    deeper = tree.add(0, second)
    built = tree.build()
    after = {(0,): [0.7, 0.29, 0.01], (1,): [0.5, 0.3, 0.2]}
    verdict = Typical().verify(
        built, PathLaws(built, lambda path: after.get(path, A[0])), SeededDice(0)
    )
    assert verdict.nodes == [second, deeper] and deep != deeper
    assert best_path(built, {}) == []


def test_a_node_below_a_refused_one_is_refused():
    built = chain([2, 0, 0])
    laws = PathLaws(built, lambda path: [0.6, 0.39, 0.01] if not path else [1.0, 0.0, 0.0])
    assert Typical().verify(built, laws, SeededDice(0)).nodes == []


def test_greedy_requests_get_the_argmax_and_constraints_hold():
    from harness import distance

    law, draft = table_law(1), FakeRunner(table_law(2))

    def error(sampling: Sampling, shapers=tuple) -> float:
        return distance(
            law,
            lambda: registry.make("drafter", "draft_model", model=draft),
            Typical(),
            plan=Plan(2, 2),
            sampling=sampling,
            shapers=shapers,
        )

    assert error(Sampling(temperature=0)) <= 1e-12
    assert error(Sampling(temperature=0), lambda: (NoRepeats(),)) <= 1e-12
    assert error(Sampling()) > 0.01  # it does lose something


def test_forbidden_tokens_are_never_kept():
    tree = chain([1, 1])
    verdict = Typical().verify(tree, PathLaws(tree, np.array([0.5, 0.0, 0.5])), SeededDice(0))
    assert verdict.nodes == [] and verdict.token != 1


@pytest.mark.parametrize("options", [{"epsilon": 0}, {"epsilon": 1.0}, {"delta": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match="typical needs .* use 'speculative'"):
        Typical(**options)


def test_a_server_refuses_it_unless_told():
    with pytest.raises(ConfigError, match="'typical' is lossy"):
        make_verifier("typical", allow_lossy=False)
    assert not make_verifier("typical:epsilon=0.2", allow_lossy=True).lossless


def test_a_law_that_is_none_is_an_error():
    tree = chain([0])
    with pytest.raises(ConfigError, match="should sum to 1"):
        Typical().verify(tree, PathLaws(tree, np.full(3, np.nan)), SeededDice(0))
