"""STAND keeps the law: greedy identity, the snapshot of q, the joint law by frequencies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import chi2
from test_stand_drafter import ARRAYS, PlainLaws, fill, sequence

from fakes import FakeTarget, PlainDice, table_law
from forerun.controllers.fixed import Fixed
from forerun.core.dice import EnumeratedDice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.core.tree_template import best_first, grid
from forerun.drafters.stand import Stand
from forerun.engine.engine import Engine
from forerun.verifiers.greedy import Greedy
from forerun.verifiers.recursive import Recursive
from forerun.verifiers.speculative import Speculative


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    Speculative().warm_up()


def test_greedy_decoding_is_token_identical() -> None:
    law = table_law(3, vocab=6, order=2)
    plain = [1, 2]
    while len(plain) < 60:
        plain.append(int(np.argmax(law(plain))))
    for verifier in (Speculative(), Greedy(), Recursive()):
        drafter = Stand(template=best_first(12))
        engine = Engine(FakeTarget(law, vocab=6), drafter, verifier, Fixed(nodes=12, depth=5))
        rounds = []
        engine.listeners.append(lambda step, rounds=rounds: rounds.append(step))
        for index in range(2):  # the second one finds a warm memory
            seq = sequence([1, 2], temperature=0.0, index=index)
            seq.limit = 58
            engine.submit(seq)
            engine.run()
            assert seq.tokens == plain
        assert len(rounds) < 58  # and it was faster than plain decoding


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_tree_is_a_snapshot(is_fast: bool) -> None:
    """What the memory learns after the draft changes nothing about the tree."""
    drafter, seq = Stand(template=grid(2, 2)), sequence([0, 1])
    rng = np.random.default_rng(1)
    fill(drafter.memory(seq), rng, 4)
    dice = seq.dice if is_fast else PlainDice(seq.dice)
    (tree,) = drafter.propose([seq], [Plan()], [dice])
    before = {name: getattr(tree, name).copy() for name in ARRAYS}
    fill(drafter.memory(seq), rng, 4, updates=300)
    drafter.propose([seq], [Plan()], [seq.dice])
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(tree, name), value)


def test_mutating_the_memory_between_draft_and_verify_keeps_the_law() -> None:
    """By enumeration: every draw of the draft, then the table changes, then every coin."""
    rng = np.random.default_rng(2)
    rows = rng.dirichlet(np.ones(3), size=8)
    laws = PlainLaws({node: rows[node] for node in range(-1, 7)})
    laws.sampling = Sampling()
    got = np.zeros(3)

    def program(dice: EnumeratedDice) -> int:
        drafter, seq = Stand(template=grid(2, 1)), sequence([0, 1])
        fresh = np.random.default_rng(3)
        fill(drafter.memory(seq), fresh, 3)
        tree = drafter.propose([seq], [Plan()], [dice])[0]
        assert len(tree) > 2
        fill(drafter.memory(seq), fresh, 3, updates=30)
        return Speculative().verify(tree, laws, dice).tokens(tree)[0]

    for token, probability in EnumeratedDice().outcomes(program):
        got[token] += probability
    np.testing.assert_allclose(got, rows[-1], atol=1e-12)


class Markov:
    """The laws of an order-2 chain below a sequence's last two tokens; enough for a verifier."""

    sampling, top_entries = Sampling(), None

    def __init__(self, chain: np.ndarray, tokens: list[int], tree: Tree) -> None:
        self.chain, self.tree = chain, tree
        self.last, self.end = tokens[-2], tokens[-1]

    def __getitem__(self, node: int) -> np.ndarray:
        if node < 0:
            return self.chain[self.last, self.end]
        parent = self.tree.parents[node]
        before = self.end if parent < 0 else self.tree.tokens[parent]
        return self.chain[before, self.tree.tokens[node]]

    def at(self, nodes: list[int]) -> list[np.ndarray]:
        return [self[node] for node in nodes]

    def unshaped(self) -> None:
        return None


def decode(chain: np.ndarray, length: int, regroup: int) -> tuple[list[Sequence], int, int]:
    """Two trajectories of an order-2 chain in one batch, on a memory that starts anew now and then.

    Returns them with the numbers of rounds and of rejections.
    """
    drafter = Stand(context=(2, 1), entries=2, template=best_first(12))
    verifier, plans = Speculative(), [Plan(nodes=12, depth=8)] * 2
    seqs = [sequence([0, 0], seed, index=seed) for seed in range(2)]
    rounds = rejected = 0
    while min(len(seq.tokens) for seq in seqs) < length:
        if rounds % regroup == 0:
            for seq in seqs:
                seq.group = rounds
        rounds += 1
        trees = drafter.propose(seqs, plans, [s.dice for s in seqs])
        laws = [Markov(chain, seq.tokens, tree) for seq, tree in zip(seqs, trees, strict=True)]
        verdicts = [
            verifier.verify(tree, law, seq.dice)
            for tree, law, seq in zip(trees, laws, seqs, strict=True)
        ]
        emitted = [v.tokens(tree) for v, tree in zip(verdicts, trees, strict=True)]
        for seq, tokens, tree, verdict in zip(seqs, emitted, trees, verdicts, strict=True):
            seq.tokens += tokens
            rejected += bool(tree.children(verdict.nodes[-1] if verdict.nodes else -1))
        drafter.observe(Step(seqs, plans, trees, laws, verdicts, emitted))
    return seqs, rounds, rejected


@pytest.mark.slow
def test_joint_law_of_two_trajectories_that_share_a_memory() -> None:
    """4 tokens at a time, given the two before: chi-square over all 16 x 256 strings."""
    rng = np.random.default_rng(5)
    chain = rng.dirichlet(np.full(4, 0.6), size=(4, 4))
    length = 400_002
    seqs, rounds, rejected = decode(chain, length, regroup=200)
    texts = [np.array(seq.tokens[:length]) for seq in seqs]
    assert 2.5 < length / rounds < 6 and rejected > 50_000  # drafts matter, and fail

    blocks = np.concatenate([np.lib.stride_tricks.sliding_window_view(t, 6)[::4] for t in texts])
    assert len(blocks) >= 2e5 - 2
    counts = np.zeros((4,) * 6)
    np.add.at(counts, tuple(blocks.T), 1)
    statistic = freedom = 0.0
    for a, b in itertools.product(range(4), repeat=2):
        law = np.einsum("c,cd,cde,def->cdef", chain[a, b], chain[b], chain, chain).ravel()
        seen, expected = counts[a, b].ravel(), law * counts[a, b].sum()
        rare = expected < 5
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        statistic += ((seen - expected) ** 2 / expected)[expected > 0].sum()
        freedom += np.count_nonzero(expected) - 1
    assert chi2.sf(statistic, freedom) > 1e-3

    surprises = []
    for text in texts:  # token minus its mean given the past: a martingale difference
        means = (chain @ np.arange(4))[text[:-2], text[1:-1]]
        surprises.append(text[2:] - means)
    product = surprises[0] * surprises[1]
    assert abs(product.mean()) < 4 * product.std() / np.sqrt(len(product))
