"""The adjacency matrix: selection and filling against definitions, tensors against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.tree import POINT, Tree
from forerun.core.tree_template import Template, best_first, grid
from forerun.ngrams.tables.adjacency.cpu import UNKNOWN, Adjacency, flattened, warm_up
from forerun.ngrams.tables.adjacency.gpu import TensorAdjacency, keys

BOTH = [Adjacency, TensorAdjacency]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm_up()


def top_ids(row: np.ndarray, entries: int) -> list[int]:
    """The definition: falling logits, equal ones by id, no -inf and no NaN; then UNKNOWN."""
    order = sorted((i for i in range(len(row)) if row[i] > -np.inf), key=lambda i: (-row[i], i))
    return (order + [UNKNOWN] * entries)[:entries]


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Few distinct values, so that ties are common; some -inf, NaN and negative zeros."""
    logits = rng.integers(-3, 4, (rows, vocab)) * rng.choice([0.5, 1e-3, 1e5])
    logits = np.where(rng.random(logits.shape) < 0.1, -np.inf, logits)
    logits = np.where(rng.random(logits.shape) < 0.05, np.nan, logits)
    logits = np.where(rng.random(logits.shape) < 0.1, -0.0, logits)
    return torch.from_numpy(logits.astype(np.float32))


def random_matrix(rng: np.random.Generator, vocab: int, entries: int) -> np.ndarray:
    """Distinct successors, of which some rows know fewer, some none."""
    rows = [rng.permutation(vocab)[:entries] for _ in range(vocab)]
    matrix = np.full((vocab, entries), UNKNOWN, np.int32)
    for token, row in enumerate(rows):
        size = int(rng.choice([0, len(row), rng.integers(len(row) + 1)]))
        matrix[token, :size] = row[:size]
    return matrix


def holding(kind: type, matrix: np.ndarray) -> Adjacency | TensorAdjacency:
    made = kind(*matrix.shape)
    made.fill(matrix)
    return made


def filled(matrix: np.ndarray, root: int, template: Template, nodes: int, depth: int) -> list:
    """The definition: (rank path, token) of every place whose whole path is known."""
    tokens = {(): root}
    for place in template.places[:nodes]:
        *stem, rank = place
        above = tokens.get(tuple(stem))
        if above is not None and rank < matrix.shape[1] and len(place) <= depth:
            token = int(matrix[above, rank])
            if token != UNKNOWN:
                tokens[place] = token
    del tokens[()]
    return sorted(tokens.items(), key=lambda item: (len(item[0]), item[0]))


def with_places(tree: Tree) -> list:
    """(rank path, token) of every node of a tree that fills a template in order."""
    places: dict[int, tuple[int, ...]] = {-1: ()}
    for node, parent in enumerate(tree.parents.tolist()):
        rank = sum(int(p) == parent for p in tree.parents[:node])
        places[node] = (*places[parent], rank)
    return [(places[node], int(tree.tokens[node])) for node in range(len(tree))]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("seed", range(30))
def test_selection_equals_a_sort(kind: type, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab, entries = int(rng.integers(1, 200)), int(rng.integers(1, 11))
    count = int(rng.integers(1, 6))
    logits = random_logits(rng, 8, vocab)
    matrix = kind(vocab, entries)
    tokens = rng.permutation(vocab)[:count].astype(np.int64)
    rows = rng.permutation(8)[: len(tokens)].astype(np.int64)
    matrix.learn(tokens, rows, logits)
    for token, row in zip(tokens, rows, strict=True):
        assert matrix.to_numpy()[token].tolist() == top_ids(logits[row].numpy(), entries)
    others = np.setdiff1d(np.arange(vocab), tokens)
    assert (matrix.to_numpy()[others] == UNKNOWN).all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_keys_are_in_the_order_of_floats(row: list[float]) -> None:
    values = np.array(row, np.float32)
    order = keys(torch.from_numpy(values)[None])[0].argsort(descending=True).tolist()
    clean = np.where(np.isnan(values), -np.inf, values)
    assert order == sorted(range(len(row)), key=lambda i: (-clean[i], i))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_number_types_are_compared_as_float32(kind: type, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    matrix = kind(300, 8)
    tokens, rows = np.array([7, 2, 9]), np.array([4, 0, 3])
    matrix.learn(tokens, rows, logits)
    for token, row in zip(tokens, rows, strict=True):
        assert matrix.to_numpy()[token].tolist() == top_ids(logits[row].float().numpy(), 8)


def test_rows_of_a_wider_or_a_turned_array_are_read_in_place() -> None:
    """The native kernels give rows that are padded; a split gives rows amid others."""
    wide = torch.randn(12, 80, generator=torch.Generator().manual_seed(2))
    for logits in (wide.narrow(1, 0, 70), wide.split([3, 9])[1], wide.t(), wide[3:4].expand(4, -1)):
        matrix = Adjacency(100, 3)
        rows = np.arange(len(logits), dtype=np.int64)
        matrix.learn(rows, rows, logits)
        for row in rows:
            assert matrix.matrix[row].tolist() == top_ids(logits[row].numpy(), 3)
    line, stride = flattened(wide.narrow(1, 0, 70)[2:])
    assert stride == 80 and np.shares_memory(line, wide.numpy())


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("seed", range(25))
def test_filling_equals_the_definition(kind: type, seed: int) -> None:
    rng = np.random.default_rng([3, seed])
    vocab, entries = int(rng.integers(2, 20)), int(rng.integers(1, 6))
    matrix = random_matrix(rng, vocab, entries)
    template = [grid(3, 2, 2), best_first(60), grid(1, 1, 1, 1), grid(7)][seed % 4]
    nodes, depth = int(rng.integers(1, 70)), int(rng.integers(1, 6))
    roots = rng.integers(0, vocab, 4).tolist()
    trees = holding(kind, matrix).draft(roots, template.first(nodes), depth)
    for root, tree in zip(roots, trees, strict=True):
        assert with_places(tree) == filled(matrix, root, template, nodes, depth)
        assert (tree.parents < np.arange(len(tree))).all()
        assert tree.laws.tolist() == [POINT] * len(tree) and (tree.rows == -1).all()


@pytest.mark.parametrize("kind", BOTH)
def test_example_of_the_sheet(kind: type) -> None:
    matrix = np.full((6, 2), UNKNOWN, np.int32)
    matrix[1:4] = [[2, 3], [4, 5], [0, 1]]
    template = Template(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    (tree,) = holding(kind, matrix).draft([1], template.first(5), 9)
    assert tree.tokens.tolist() == [2, 3, 4, 5, 0]
    assert tree.parents.tolist() == [-1, -1, 0, 0, 1]


@pytest.mark.parametrize("kind", BOTH)
def test_filling_up_keeps_what_is_known(kind: type) -> None:
    matrix = holding(kind, np.array([[1, 2], [UNKNOWN, UNKNOWN], [0, UNKNOWN]], np.int32))
    matrix.fill(np.array([[0, 0], [2, 1], [1, 1]], np.int32))
    assert matrix.to_numpy().tolist() == [[1, 2], [2, 1], [0, UNKNOWN]]
    assert matrix.successors(0).tolist() == [1, 2] and matrix.successors(2).tolist() == [0]
    assert matrix.nbytes == 3 * 2 * 4
