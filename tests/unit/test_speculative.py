"""The fast verifier against the plain one, decision by decision."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import sequence
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Rows
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, IID, POINT, SWOR, Proposal, Tree, TreeBuilder
from forerun.errors import ConfigError
from forerun.verifiers._rejection import split_scratch
from forerun.verifiers.recursive import Recursive
from forerun.verifiers.speculative import Speculative

VOCAB = 50


class TableLaws(dict):
    """laws[node] from a dict; enough of `TargetProbs` for a verifier."""

    sampling = Sampling()

    def logits(self, node: int) -> np.ndarray:
        return np.log(self[node])

    def unshaped(self) -> None:
        return None


class LateDice(SeededDice):
    """Uniforms crowded below 1, so that even tiny rejection probabilities come true."""

    def __init__(self, *seed: int) -> None:
        super().__init__(*seed)
        self._block = 1.0 - 10.0 ** (-12.0 * self._block)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    Speculative().warm_up()


def random_proposal(rng: np.random.Generator, vocab: int) -> Proposal:
    size = int(rng.integers(1, 11)) if rng.random() < 0.8 else vocab
    ids = np.sort(rng.choice(vocab, size, replace=False)).astype(np.int32)
    return Proposal(ids, rng.dirichlet(np.full(size, 0.7)))


def add_siblings(
    rng: np.random.Generator, tree: TreeBuilder, parent: int, vocab: int, num_most: int = 5
) -> None:
    """Children of all three labels from up to two proposals, as a fused tree would have them."""
    proposals = [random_proposal(rng, vocab) for _ in range(2)]
    tried: set[int] = set()
    for _ in range(int(rng.integers(0, num_most + 1))):
        law = int(rng.integers(0, 3))
        q = proposals[int(rng.random() < 0.3)]
        if law == POINT:
            token = int(rng.integers(0, vocab))
            tree.add(token, parent)
        else:
            left = np.array([law == IID or t not in tried for t in q.ids.tolist()]) * q.probs
            if left.sum() <= 0:
                continue
            token = int(q.ids[rng.choice(len(left), p=left / left.sum())])
            tree.add(token, parent, law, q)
        tried.add(token)


def random_tree(rng: np.random.Generator, vocab: int = VOCAB) -> Tree:
    tree, parent = TreeBuilder(), -1
    while parent < len(tree) and len(tree) < 20:
        add_siblings(rng, tree, parent, vocab)
        parent += 1
    return tree.build()


def random_law(
    rng: np.random.Generator, tree: Tree, node: int, vocab: int, kind: int
) -> np.ndarray:
    """A target law [vocab]: smooth, zero after top-k, equal or nearly equal to a child's q."""
    p = rng.dirichlet(np.full(vocab, [0.3, 3.0][int(rng.integers(2))]))
    drawn = [q for q in map(tree.q, tree.children(node)) if q is not None]
    if kind == 1:
        p[np.argsort(p)[: -int(rng.integers(1, 6))]] = 0.0
    elif kind >= 2 and drawn:
        share = [0.0, 1e-13, 1e-9, 1e-4, 0.3][int(rng.integers(5))] if kind == 3 else 0.0
        p *= share
        p[drawn[0].ids] += (1 - share) * drawn[0].probs
    return p / p.sum()


@pytest.mark.parametrize(
    ("dice", "dtype"),
    [
        (SeededDice, np.float32),
        (LateDice, np.float64),
        pytest.param(SeededDice, np.float64, marks=pytest.mark.slow),
    ],
)
def test_same_outcome_as_plain_on_random_trees(dice: type, dtype: type) -> None:
    fast, plain, depths = Speculative(), Recursive(), []
    for seed in range(800):
        rng = np.random.default_rng([seed, 7])
        tree = random_tree(rng)
        laws = TableLaws(
            {
                node: random_law(rng, tree, node, VOCAB, seed % 4).astype(dtype)
                for node in range(-1, len(tree))
            }
        )
        ours, theirs = dice(seed), dice(seed)
        assert fast.verify(tree, laws, ours) == plain.verify(tree, laws, theirs), seed
        assert ours.uniform() == theirs.uniform()  # and as many uniforms were used
        depths.append(len(fast.verify(tree, laws, ours).nodes))
    assert max(depths) >= 2 and min(depths) == 0
    rooms = [split_scratch.py_func(*room, vocab) for vocab, room in fast._buffers.items()]
    assert rooms and not any(room.marks.any() for room in rooms)


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_one_call_for_all_nodes_is_the_rule_over_the_softmax_of_the_rows(vocab: int) -> None:
    fast, plain, depths = Speculative(), Recursive(), []
    for seed in range(800 if vocab == VOCAB else 60):
        rng = np.random.default_rng([seed, 9])
        tree = random_tree(rng, vocab)
        rows = [random_law(rng, tree, node, vocab, seed % 2) for node in range(-1, len(tree))]
        with np.errstate(divide="ignore"):
            logits = (0.6 * np.log(rows) + rng.normal()).astype(np.float32)
        seq = sequence((0, 1), 9, SeededDice(0), Sampling(temperature=0.6))
        ours, theirs = SeededDice(seed), SeededDice(seed)
        laws, beside = (TargetProbs(Rows(logits), seq, tree, ()) for _ in range(2))
        assert laws.unshaped() is logits
        verdict = fast.verify(tree, laws, ours)
        assert verdict == plain.verify(tree, beside, theirs), seed
        assert ours.uniform() == theirs.uniform()
        for node in (-1, *verdict.nodes):  # and whoever learns from them finds the same laws
            np.testing.assert_allclose(laws[node], beside[node], rtol=2e-5, atol=1e-37)
        depths.append(len(verdict.nodes))
    assert max(depths) >= 1 and min(depths) == 0


@pytest.mark.parametrize("row", [[np.nan, 0.0], [-np.inf, -np.inf], [0.0, np.inf], [0.0, -np.nan]])
def test_logits_that_make_no_law_are_refused_by_the_same_words(row: list[float]) -> None:
    seq = sequence((0, 1), 9, SeededDice(0))
    laws = TargetProbs(Rows(np.array([row], np.float32)), seq, EMPTY, ())
    with pytest.raises(ConfigError, match="no token is allowed|expected a finite number"):
        Speculative().verify(EMPTY, laws, SeededDice(0))


def test_what_a_temperature_does_not_tell_goes_the_way_of_single_nodes() -> None:
    logits = np.zeros((1, 4), np.float32)
    for more in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}):
        seq = sequence((0, 1), 9, SeededDice(0), Sampling(**more))
        assert TargetProbs(Rows(logits), seq, EMPTY, ()).unshaped() is None
    seq = sequence((0, 1), 9, SeededDice(0))
    assert TargetProbs(Rows(logits.astype(np.float64)), seq, EMPTY, ()).unshaped() is None
    assert TargetProbs(Rows(np.zeros((2, 8), np.float32)[:, :4]), seq, EMPTY, ()).unshaped() is None
    seq.states = ("adjusted",)
    assert TargetProbs(Rows(logits), seq, EMPTY, ()).unshaped() is None


def test_same_outcome_on_a_large_vocabulary() -> None:
    fast, plain, vocab = Speculative(), Recursive(), 5000  # several blocks, the last one short
    for seed in range(60):
        rng = np.random.default_rng([seed, 8])
        tree = random_tree(rng, vocab)
        laws = TableLaws(
            {n: random_law(rng, tree, n, vocab, seed % 4) for n in range(-1, len(tree))}
        )
        ours, theirs = LateDice(seed), LateDice(seed)
        assert fast.verify(tree, laws, ours) == plain.verify(tree, laws, theirs)


def test_rejection_of_an_equal_law_falls_back_to_the_law() -> None:
    q = Proposal(np.array([1, 2], np.int32), np.array([0.25, 0.75]))
    tree = TreeBuilder()
    tree.add(1, -1, IID, q)
    tree.add(1, -1, IID, q)
    p = np.array([0.0, 0.25 * (1 - 1e-14), 0.75, 0.0])
    dice = SeededDice(0)
    dice._block = np.array([1 - 1e-16, 1 - 1e-16, 0.5])
    verdict = Speculative().verify(tree.build(), TableLaws({-1: p}), dice)
    assert verdict.nodes == [] and verdict.token == 2


def test_law_is_kept_by_enumeration() -> None:
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(5)), Proposal.of(rng.dirichlet(np.ones(5)))

    def program(dice: EnumeratedDice) -> int:
        tree = TreeBuilder()
        tree.add(4)
        left = q.probs * (q.ids != 4)
        for i in dice.without_replacement(left, 2):
            tree.add(int(q.ids[i]), -1, SWOR, q)
        verdict = Speculative().verify(
            tree.build(), TableLaws(dict.fromkeys(range(-1, 3), p)), dice
        )
        return verdict.tokens(tree.build())[0]

    law = np.zeros(5)
    for token, probability in EnumeratedDice().outcomes(program):
        law[token] += probability
    np.testing.assert_allclose(law, p, atol=1e-12)


def test_greedy_follows_the_argmax_and_uses_no_chance() -> None:
    tree = TreeBuilder()
    first = tree.add(2)
    tree.add(0, first)
    laws = TableLaws({-1: np.array([0.2, 0.3, 0.5]), 0: np.array([0.1, 0.8, 0.1])})
    laws.sampling = Sampling(temperature=0.0)
    dice = SeededDice(0)
    assert Speculative().verify(tree.build(), laws, dice).tokens(tree.build()) == [2, 1]
    assert dice.uniform() == SeededDice(0).uniform()


def one_node(token: int, ids: list[int], probs: list[float]) -> Tree:
    tree = TreeBuilder()
    tree.add(token, -1, SWOR, Proposal(np.array(ids, np.int32), np.array(probs)))
    return tree.build()


@pytest.mark.parametrize("verifier", [Speculative, Recursive])
@pytest.mark.parametrize("row", [[np.nan, 0.5, 0.5], [0.0, 0.0, 0.0], [np.nan] * 3])
def test_broken_law_is_refused(verifier: type, row: list[float]) -> None:
    tree = one_node(0, [0, 1], [0.5, 0.5])
    with pytest.raises(ConfigError, match="should sum to 1"):
        for seed in range(50):
            verifier().verify(
                tree, TableLaws({-1: np.array(row), 0: np.array(row)}), SeededDice(seed)
            )


@pytest.mark.parametrize("verifier", [Speculative, Recursive])
def test_token_of_zero_q_is_refused(verifier: type) -> None:
    laws = TableLaws({-1: np.array([0.2, 0.3, 0.5])})
    with pytest.raises(AssertionError, match="with q = 0"):
        verifier().verify(one_node(2, [0, 1], [0.5, 0.5]), laws, SeededDice(0))


def test_a_sibling_drawn_twice_without_replacement_is_refused() -> None:
    q = Proposal(np.array([0, 1], np.int32), np.array([0.5, 0.5]))
    tree = TreeBuilder()
    tree.add(0, -1, SWOR, q)
    tree.add(0, -1, SWOR, q)
    with pytest.raises(AssertionError, match="with q = 0"):
        Speculative().verify(
            tree.build(), TableLaws({-1: np.array([0.0, 0.1, 0.9])}), SeededDice(0)
        )


@pytest.mark.parametrize("ids", [[0, 3], [0, -1]])
def test_q_of_another_vocabulary_is_refused(ids: list[int]) -> None:
    laws = TableLaws({-1: np.array([0.2, 0.3, 0.5])})
    with pytest.raises(AssertionError, match="of 3 tokens"):
        Speculative().verify(one_node(0, ids, [0.5, 0.5]), laws, SeededDice(0))
