"""Lookahead: its window as a tree, its pool, and greedy texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes import FakeTarget, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Plan, Rows, Sequence, Step, Verdict
from forerun.core.sampling import Sampling
from forerun.core.tree import POINT, Tree, chain
from forerun.drafters.fuse import merge
from forerun.drafters.lookahead import Lookahead, Pool, Trie, Window, best_tokens
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder
from forerun.errors import ConfigError


def a_sequence(tokens: list[int]) -> Sequence:
    return Sequence(list(tokens), len(tokens), Sampling(), SeededDice(0), limit=10**6)


def full_window(ngram: int, columns: int, text: list[int]) -> Window:
    """A window all of whose guesses differ: row r, column i is 100 (r + 1) + i."""
    window = Window(ngram)
    window.rows = [[100 * (r + 1) + i for i in range(columns)] for r in range(ngram - 1)]
    window.widen(columns, 10**6, 10**6, text)
    return window


def as_tree(window: Window) -> Tree:
    trie = Trie()
    for path in window.paths():
        trie.add(path, 10**6)
    return trie.build()


# the window is a tree


@pytest.mark.parametrize(("ngram", "columns"), [(2, 4), (3, 1), (3, 5), (5, 7)])
def test_the_tree_sees_what_the_papers_mask_shows(ngram: int, columns: int) -> None:
    """Token (r, i) sees row 0 up to column i, its own column above it, itself; stands r + i on."""
    window = full_window(ngram, columns, [9])
    tree = as_tree(window)
    cells = {window.rows[r][i]: (r, i) for r in range(ngram - 1) for i in range(columns)}
    del cells[9]  # row 0, column 0 is the root
    assert sorted(cells) == sorted(tree.tokens.tolist())
    assert len(tree) == columns * (ngram - 1) - 1
    for node, token in enumerate(tree.tokens.tolist()):
        r, i = cells[token]
        assert tree.depths[node] == r + i
        for other, token_seen in enumerate(tree.tokens.tolist()):
            s, j = cells[token_seen]
            sees = (s == 0 and j <= i) or (s <= r and j == i)
            assert tree.ancestors[node, other] == sees
    assert tree.laws.tolist() == [POINT] * len(tree)


def test_a_new_row_makes_grams_and_moves_the_window() -> None:
    window = full_window(4, 3, [7])
    grams = window.advance([41, 42, 43], 1)
    assert grams == [(7, (200, 300, 41)), (101, (201, 301, 42)), (102, (202, 302, 43))]
    assert window.rows == [[200, 201, 202], [300, 301, 302], [41, 42, 43]]
    grams = full_window(4, 3, [7]).advance([], 1)
    assert grams == []


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_guesses_keep_their_places_in_the_text(count: int) -> None:
    """Cell (r, i) is about the token r + i after the root, before and after the root moved."""
    columns = 5
    for rows, height in ((2, 4), (3, 3)):
        window = Window(height + 1)
        window.rows = [[r + i for i in range(columns)] for r in range(rows)]  # absolute places
        window.widen(columns, 10**6, 10**6, [0])
        window.advance([rows + i for i in range(columns)], count)
        assert len(window.rows) == min(rows + 1, height)
        for r, row in enumerate(window.rows):
            assert row == [count + r + i for i in range(len(row))]


def test_rows_grow_from_copied_text() -> None:
    window = Window(4)
    window.widen(5, 99, 99, [11, 12, 13])
    assert window.rows == [[13, 11, 12, 13, 11]]  # the root, then the text over and over
    assert window.paths() == [(), (11,), (11, 12), (11, 12, 13), (11, 12, 13, 11)]
    assert window.advance([1, 2, 3, 4, 5], 2) == []
    assert window.rows == [[12, 13, 11], [3, 4, 5]]
    window.widen(4, 99, 99, [11, 12, 13, 1, 9])
    assert window.rows == [[9, 13, 11, 9], [3, 4, 5, 11]]
    assert window.paths() == [(3,), (13, 4), (13, 11, 5), (13, 11, 9, 11)]


@pytest.mark.parametrize(("nodes", "depth"), [(0, 9), (1, 9), (11, 9), (20, 4), (26, 9), (27, 2)])
def test_columns_fit_into_nodes_and_depth(nodes: int, depth: int) -> None:
    window = full_window(5, 7, [9])
    window.widen(7, nodes, depth, [9])
    tree = as_tree(window)
    assert len(tree) <= nodes and tree.depths.max(initial=0) <= depth
    assert window.columns == max(0, min(7, (nodes + 1) // 4, depth - 2))


def test_best_tokens_are_found_by_paths_in_any_tree() -> None:
    """Another drafter's nodes may stand before, between and behind ours."""
    window = full_window(3, 3, [9])
    ours = as_tree(window)
    fused = merge([chain([5, 6]), chain([101, 8]), ours])
    logits = torch.randn(len(fused) + 1, 50, generator=torch.Generator().manual_seed(1))
    where = {tuple(fused.path(node)): node for node in range(len(fused))}
    expected = [int(logits[where[path] + 1].argmax()) for path in window.paths()]
    assert best_tokens(fused, window.paths(), logits) == expected
    assert best_tokens(chain([200]), window.paths(), logits) == [int(logits[1].argmax())]
    assert best_tokens(chain([]), window.paths(), logits) == []
    assert best_tokens(fused, [], logits) == []


# the pool


def test_the_pool_drops_what_was_put_there_first() -> None:
    pool = Pool(3, 2)
    for rest in ((1, 1), (2, 2), (1, 1)):
        pool.add(5, rest)
    assert pool.of(5) == [(1, 1), (2, 2)] and pool.size == 2
    pool.add(5, (3, 3))  # (1, 1) came again later than (2, 2)
    assert pool.of(5) == [(3, 3), (1, 1)] and pool.size == 2
    pool.add(6, (1, 1))
    assert pool.of(6) == [(1, 1)] and pool.of(7) == [] and pool.size == 3


def test_the_pool_reads_texts() -> None:
    pool = Pool(3, 9)
    pool.read([1, 2, 3, 1, 2, 4])
    assert pool.of(1) == [(2, 4), (2, 3)] and pool.of(2) == [(3, 1)] and pool.of(3) == [(1, 2)]
    pool.read([1, 2])
    assert pool.size == 4


# the drafter


def follow(drafter: Lookahead, seq: Sequence, law, plan: Plan, count: int = 1) -> Tree:
    """One step whose target is a law over tokens; emits the `count` tokens that it likes best."""
    (tree,) = drafter.propose([seq], [plan], [seq.dice])
    paths = [tree.path(node) for node in range(-1, len(tree))]
    logits = torch.from_numpy(np.log(np.stack([law(seq.tokens + path) for path in paths])))
    laws = TargetProbs(Rows(logits), seq, tree, ())
    emitted: list[int] = []
    for _ in range(count):
        emitted.append(int(np.argmax(law(seq.tokens + emitted))))
    seq.tokens += emitted
    verdict = Verdict([], emitted[-1])
    drafter.observe(Step([seq], [plan], [tree], [laws], [verdict], [emitted]))
    return tree


@pytest.mark.parametrize("ngram", [2, 3, 5])
def test_a_run_follows_the_definition(ngram: int) -> None:
    """Rows and pool, simulated beside it with plain lists."""
    law, columns = table_law(5, vocab=9), 4
    drafter, seq = Lookahead(ngram=ngram, window=columns, guesses=3), a_sequence([1, 2, 3, 4])
    rows, pool, copied = [[0] * 0], {}, 0
    rng = np.random.default_rng(0)
    for _ in range(40):
        before, count = list(seq.tokens), int(rng.integers(1, 4))
        rows[0][:1] = before[-1:]
        for row in rows:
            while len(row) < columns:
                row.append(before[copied % len(before)])
                copied += 1
        grams = list(pool.get(before[-1], []))
        tree = follow(drafter, seq, law, Plan(1000, 100), count)
        paths = {tuple(tree.path(node)) for node in range(len(tree))}
        assert {tuple(gram) for gram in grams} <= paths
        new = [
            int(np.argmax(law([*before, *rows[0][1 : i + 1], *(row[i] for row in rows[1:])])))
            for i in range(columns)
        ]
        if len(rows) == ngram - 1:
            for i, token in enumerate(new):
                gram = [row[i] for row in rows[1:]] + [token]
                known = pool.setdefault(rows[0][i], [])
                pool[rows[0][i]] = ([g for g in known if g != gram] + [gram])[-3:]
        rows.append(new)
        if len(rows) == ngram:
            rows = [row[count - 1 :] for row in rows[1:]]
        else:
            rows = [row[count:] for row in rows]
    state = seq.scratch[drafter]
    assert state.window.rows == rows
    assert {t: [list(g) for g in state.pool.of(t)[::-1]] for t in range(9) if state.pool.of(t)} == {
        t: grams for t, grams in pool.items() if grams
    }
    assert state.pool.size == sum(map(len, pool.values())) > 9


@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 30, 55, 200])
def test_trees_keep_to_the_plan(nodes: int) -> None:
    law, rng = table_law(2, vocab=6), np.random.default_rng(nodes)
    drafter, seq = Lookahead(from_prompt=True), a_sequence([1, 2, 3])
    sizes = []
    for _ in range(60):
        plan = Plan(nodes, int(rng.integers(1, 14)))
        tree = follow(drafter, seq, law, plan, int(rng.integers(1, 4)))
        assert len(tree) <= nodes and tree.depths.max(initial=0) <= plan.depth
        edges = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
        assert len(edges) == len(set(edges))  # equal siblings are one node
        assert tree.laws.tolist() == [POINT] * len(tree)
        sizes.append(len(tree))
    assert max(sizes) > min(nodes, 30) / 2


def test_steps_without_drafts_move_the_window_too() -> None:
    law = table_law(2, vocab=6)
    drafter, seq = Lookahead(ngram=3, window=3), a_sequence([1, 2, 3])
    follow(drafter, seq, law, Plan(50, 9))
    rows = [list(row) for row in seq.scratch[drafter].window.rows]
    follow(drafter, seq, law, Plan(0, 9), count=1)
    assert seq.scratch[drafter].window.rows == [row[1:] for row in rows]


def test_sequences_do_not_share_and_are_forgotten() -> None:
    law = table_law(2, vocab=6)
    drafter, one, two = Lookahead(), a_sequence([1, 2, 3]), a_sequence([1, 2, 3])
    for _ in range(20):
        follow(drafter, one, law, Plan(55, 16))
    assert drafter.memory_report()["n-gram pools"] > 0
    assert not any(drafter._state(two).pool.of(token) for token in range(6))
    drafter.finish(one)
    drafter.finish(two)
    drafter.finish(a_sequence([1]))  # one that never ran may be cancelled
    assert drafter.memory_report()["n-gram pools"] == 0


@pytest.mark.parametrize("options", [{}, {"ngram": 3, "window": 3, "from_prompt": True}])
@pytest.mark.parametrize("nodes", [6, 55])
def test_greedy_texts_are_plain_greedy_texts(options: dict, nodes: int) -> None:
    law = table_law(4, vocab=40, order=2)
    texts, recorder = {}, Recorder()
    for drafter in (registry.make("drafter", "none"), Lookahead(**options)):
        verifier = registry.make("verifier", "speculative")
        engine = Engine(
            FakeTarget(law, 40), drafter, verifier, Fixed(nodes=nodes), listeners=[recorder]
        )
        seqs = [sequence([1, 2], 400, SeededDice(0), Sampling(temperature=0)) for _ in range(2)]
        texts[type(drafter).__name__] = run_all(engine, seqs)
    assert len(set(texts.values())) == 1
    least = 1.2 if nodes == 55 else 1.0  # a greedy text of few tokens repeats
    assert all(recorder.of(seq).tau >= least for seq in seqs)


@pytest.mark.parametrize("options", [{"ngram": 1}, {"window": 0}, {"guesses": 0}])
def test_bad_options(options: dict) -> None:
    with pytest.raises(ConfigError, match="the paper uses 5, 7 and 7"):
        Lookahead(**options)
