"""The walk over tensors against the plain one: outcome by outcome, batch by batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_speculative import LateDice, TableLaws, one_node, random_law, random_tree

from fakes import FakeTarget, NoRepeats, TableSource, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, IID, SWOR, Proposal, Tree, TreeBuilder
from forerun.drafters.base import Grown
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.verifiers import _gpu as tensor_walk
from forerun.verifiers._gpu import Forest, forest, verdicts, walk
from forerun.verifiers.recursive import Recursive


def laws_of(tree: Tree, rng: np.random.Generator, vocab: int, kind: int, dtype) -> np.ndarray:
    rows = [random_law(rng, tree, node, vocab, kind) for node in range(-1, len(tree))]
    return np.stack(rows).astype(dtype)


def plainly(tree: Tree, p: np.ndarray, dice: SeededDice):
    laws = TableLaws(dict(enumerate(p, start=-1)))
    return Recursive().verify(tree, laws, dice)


@pytest.mark.parametrize(
    ("dice", "dtype", "vocab"),
    [
        (SeededDice, np.float32, 50),
        pytest.param(SeededDice, np.float64, 50, marks=pytest.mark.slow),
        pytest.param(LateDice, np.float64, 50, marks=pytest.mark.slow),
        (LateDice, np.float64, 2000),
    ],
)
def test_same_outcome_as_plain_on_batches_of_random_trees(dice: type, dtype, vocab: int) -> None:
    depths = []
    for seed in range(150 if vocab == 50 else 12):
        rng = np.random.default_rng([seed, 7])
        trees = [random_tree(rng, vocab) for _ in range(5)] + [EMPTY]
        p = [laws_of(tree, rng, vocab, (seed + i) % 4, dtype) for i, tree in enumerate(trees)]
        ours, theirs = ([dice(seed, i) for i in range(len(trees))] for _ in range(2))
        found = verdicts([torch.from_numpy(rows) for rows in p], trees, ours)
        for one, tree, rows, mine, other in zip(found, trees, p, ours, theirs, strict=True):
            assert one == plainly(tree, rows, other), seed
            assert mine.uniform() == other.uniform()  # and as many uniforms were used
            depths.append(len(one.nodes))
    assert max(depths) >= 3 and min(depths) == 0


def test_a_tree_of_64_nodes() -> None:
    q = Proposal(np.arange(12, dtype=np.int32), np.full(12, 1 / 12))
    tree, parent = TreeBuilder(), -1
    while len(tree) < 64:
        for token in np.random.default_rng(parent + 1).permutation(12)[:4]:
            tree.add(int(token), parent, SWOR, q)
        parent += 1
    built = tree.build()
    for seed in range(40):
        p = np.random.default_rng(seed).dirichlet(np.full(12, 0.5), len(built) + 1)
        (found,) = verdicts([torch.from_numpy(p)], [built], [SeededDice(seed)])
        assert found == plainly(built, p, SeededDice(seed))


@pytest.mark.parametrize("most", [1, 1 << 18, 1 << 20])
def test_a_batch_walked_in_parts_has_the_outcomes_of_the_whole(monkeypatch, most: int) -> None:
    rng, vocab = np.random.default_rng(5), 2000
    trees = [random_tree(rng, vocab) for _ in range(12)] + [EMPTY]
    p = [torch.from_numpy(laws_of(tree, rng, vocab, 2, np.float32)) for tree in trees]
    whole, ours = ([SeededDice(1, i) for i in range(len(trees))] for _ in range(2))
    monkeypatch.setattr(tensor_walk, "MAX_WALK_BYTES", 1 << 40)
    expected, sizes = verdicts(p, trees, whole), []

    def recorded(laws: torch.Tensor, grown: Forest) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append((len(grown.uniforms), laws.nbytes + grown.q.nbytes + grown.ids.nbytes))
        return walk(laws, grown)

    monkeypatch.setattr(tensor_walk, "walk", recorded)
    monkeypatch.setattr(tensor_walk, "MAX_WALK_BYTES", most)
    assert verdicts(p, trees, ours) == expected
    assert [dice.uniform() for dice in ours] == [dice.uniform() for dice in whole]
    assert sum(num for num, _ in sizes) == len(trees) and len(sizes) > 1
    assert all(size < most for num, size in sizes if num > 1)
    assert all(num == 1 for num, _ in sizes) == (most == 1), "fewer walks where there is room"


def test_nothing_is_said_to_the_host_on_the_way() -> None:
    """Tensors of the device `meta` have shapes and no values: asking for one is an error."""
    rng = np.random.default_rng(3)
    trees = [random_tree(rng) for _ in range(3)]
    uniforms = [rng.random(len(tree) + 1) for tree in trees]
    grown = forest(trees, uniforms, 50).to("meta")
    kept, ends = walk(torch.empty(sum(map(len, trees)) + 3, 50, device="meta"), grown)
    assert kept.shape == (sum(map(len, trees)) + 3,) and ends.shape == (3, 3)


def test_rejection_of_an_equal_law_falls_back_to_the_law() -> None:
    q = Proposal(np.array([1, 2], np.int32), np.array([0.25, 0.75]))
    tree = TreeBuilder()
    tree.add(1, -1, IID, q)
    tree.add(1, -1, IID, q)
    p, dice = np.array([[0.0, 0.25 * (1 - 1e-14), 0.75, 0.0]] * 3), SeededDice(0)
    dice._block = np.array([1 - 1e-16, 1 - 1e-16, 0.5])
    (verdict,) = verdicts([torch.from_numpy(p)], [tree.build()], [dice])
    assert verdict.nodes == [] and verdict.token == 2


@pytest.mark.parametrize("row", [[np.nan, 0.5, 0.5], [0.0, 0.0, 0.0]])
def test_a_broken_law_is_refused(row: list[float]) -> None:
    p = torch.tensor([row, row])
    with pytest.raises(ConfigError, match="should sum to 1"):
        verdicts([p], [one_node(0, [0, 1], [0.5, 0.5])], [SeededDice(0)])


def test_a_broken_q_is_refused_and_the_others_are_judged(monkeypatch) -> None:
    """As the plain form does: an error, or under `python -O` a draw from the target."""
    from forerun.verifiers import base

    good, bad = one_node(1, [0, 1], [0.5, 0.5]), one_node(2, [0, 1], [0.5, 0.5])
    p = np.array([[0.2, 0.3, 0.5]] * 2)
    rows = [torch.from_numpy(p)] * 2
    with pytest.raises(AssertionError, match="with q = 0"):
        verdicts(rows, [good, bad], [SeededDice(0), SeededDice(1)])
    monkeypatch.setattr(base, "STRICT", False)
    found = verdicts(rows, [bad, good], [SeededDice(1), SeededDice(0)])
    assert found[0].nodes == [] and found[1] == plainly(good, p, SeededDice(0))
    for ids, probs in (([0, 3], [0.5, 0.5]), ([0, 1], [0.5, np.nan]), ([0, 1], [1.5, -0.5])):
        (found,) = verdicts([rows[0]], [one_node(0, ids, probs)], [SeededDice(1)])
        assert found.nodes == []


TARGET, DRAFT = table_law(1), table_law(2)


@pytest.mark.parametrize("grower", ["chain", "gumbel", "greedy_mix", "iid:width=2"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_texts_of_a_batch_are_those_of_the_plain_rule(grower: str, temperature: float) -> None:
    """Through the engine, where sequences with a constraint or top-k stay with the host."""

    def texts(verifier: str) -> list[tuple[int, ...]]:
        rule = registry.make("verifier", verifier)
        engine = Engine(
            FakeTarget(TARGET),
            Grown(TableSource(DRAFT), registry.make("grower", grower)),
            rule,
            Fixed(nodes=5, depth=3),
            shapers=(Only(1),),
            max_seqs=4,
        )
        samplings = [Sampling(temperature=temperature, top_k=k) for k in (0, 0, 2, 0)]
        seqs = [
            sequence([0, 1], 30 + i, SeededDice(5, i), sampling, index=i)
            for i, sampling in enumerate(samplings)
        ]
        return run_all(engine, seqs)

    assert texts("speculative:tensors=true") == texts("recursive")


class Only(NoRepeats):
    """No repeats, for the sequence of one index."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def start(self, seq):
        return super().start(seq) if seq.index == self.index else None
