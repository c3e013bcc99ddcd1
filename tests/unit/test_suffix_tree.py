"""The counted suffix tree against counts of all substrings; its drafts against their definition."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.ngrams.tables.suffix.draft import DraftLimits
from forerun.ngrams.tables.suffix.tree import Draft, SuffixTree, Text, warm_up

Counts = Counter[tuple[int, ...]]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm_up()


def substrings(texts: list[list[int]], depth: int) -> Counts:
    """How often each string of at most `depth` tokens occurs."""
    return Counter(
        tuple(text[i : i + n])
        for text in texts
        for i in range(len(text))
        for n in range(1, min(depth, len(text) - i) + 1)
    )


def held(tree: SuffixTree) -> list[list[int]]:
    return [text.tolist() for text in tree.all_texts()]


def check(tree: SuffixTree) -> Counts:
    """Every string has its count, and the tree is the one that its texts alone would give."""
    tree.check_integrity()
    counts = substrings(held(tree), tree.depth)
    assert all(tree.count(string) == count for string, count in counts.items())
    fresh = SuffixTree(depth=tree.depth)
    for text in held(tree):
        fresh.extend(fresh.begin(), text)
    assert fresh.num_nodes == tree.num_nodes
    return counts


def definition(counts: Counts, text: list[int], depth: int, wish: DraftLimits) -> tuple[float, int]:
    """The best score and its match: all continuations by their share, the best of them added."""
    best, match, seen = 0.0, 0, 0
    for length in range(min(len(text), depth // 2), 0, -1):
        end = tuple(text[-length:])
        places = counts[end] - 1  # without the end of the text itself
        longest = min(wish.depth, depth - length)
        shares = [
            count / places
            for string, count in counts.items()
            if string[:length] == end and length < len(string) <= length + longest and places
        ]
        if not shares or places == seen:
            continue
        seen = places
        budget = min(wish.nodes, int(wish.factor * length + wish.offset + 1e-6))
        likely = sorted((x for x in shares if x >= wish.min_prob - 1e-9), reverse=True)
        if sum(likely[:budget]) > best + 1e-12:
            best, match = sum(likely[:budget]), length
    return best, match


def paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_counts_of_an_example() -> None:
    tree = SuffixTree(depth=4)
    tree.extend(tree.begin(), [1, 2, 1, 2, 3])
    counts = {(1,): 2, (2,): 2, (1, 2): 2, (2, 1): 1, (1, 2, 3): 1, (1, 2, 1, 2): 1, (3, 1): 0}
    assert {string: tree.count(string) for string in counts} == counts
    assert len(tree) == 5 and tree.count([1, 2, 1, 2, 3]) == 0  # longer than the depth


@pytest.mark.parametrize("seed", range(40))
def test_texts_grow_side_by_side_and_the_oldest_go(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = SuffixTree(depth=int(rng.integers(2, 9)))
    vocab, running = int(rng.integers(1, 5)), []
    for _ in range(40):
        dice = rng.random()
        if dice < 0.2 or not running:
            running.append(tree.begin())
        elif dice < 0.3:
            tree.end(running.pop(int(rng.integers(len(running)))))
        elif dice < 0.4 and tree.texts:
            tree.evict()
        else:
            text = running[int(rng.integers(len(running)))]
            tree.extend(text, rng.integers(0, vocab, rng.integers(1, 9)).tolist())
        tree.check_integrity()
    check(tree)


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4), st.integers(2, 8)
)
@settings(max_examples=60, deadline=None)
def test_taking_the_oldest_out_restores_the_tree_of_the_others(texts, depth: int) -> None:
    tree = SuffixTree(depth=depth)
    for text in texts:
        tree.extend(tree.begin(), text)
    check(tree)
    tree.evict()
    assert held(tree) == texts[1:]
    check(tree)


def test_only_children_have_fewer_occurrences_than_their_parents() -> None:
    """So there are at most two nodes per token, a root, and those where the text ends."""
    rng, tree = np.random.default_rng(0), SuffixTree(depth=64)
    tree.extend(tree.begin(), rng.integers(0, 4, 5000).tolist())
    assert tree.num_nodes <= 2 * 5000 + 1 + 64


@pytest.mark.parametrize("seed", range(60))
def test_draft_is_the_best_by_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth, vocab = int(rng.integers(2, 13)), int(rng.integers(1, 6))
    tree = SuffixTree(depth=depth)
    for _ in range(int(rng.integers(0, 3))):
        tree.extend(tree.begin(), rng.integers(0, vocab, rng.integers(1, 40)).tolist())
    text = tree.begin()
    for _ in range(10):
        tree.extend(text, rng.integers(0, vocab, rng.integers(1, 8)).tolist())
        wish = DraftLimits(
            nodes=int(rng.integers(1, 12)),
            depth=int(rng.integers(1, 8)),
            factor=float(rng.choice([0.5, 1.0, 2.0])),
            offset=float(rng.integers(0, 3)),
            min_prob=float(rng.choice([0.05, 0.1, 0.3, 0.7])),
            width=99,
        )
        compare(tree, text, wish)


def compare(tree: SuffixTree, text: Text, wish: DraftLimits) -> None:
    counts, tokens = substrings(held(tree), tree.depth), held(tree)[-1]
    score, match = definition(counts, tokens, tree.depth, wish)
    draft = tree.draft(text, wish)
    if draft is None:
        assert score == 0
        return
    assert np.isclose(draft.score, score) and draft.match == match
    end = tuple(tokens[-match:])
    shares = [counts[end + path] / (counts[end] - 1) for path in paths(draft)]
    assert np.isclose(sum(shares), score) and len(set(paths(draft))) == len(shares)
    assert shares == sorted(shares, reverse=True)  # best first, hence siblings too
    assert min(shares) >= wish.min_prob - 1e-9
    assert max(map(len, paths(draft))) <= wish.depth
    assert len(shares) <= min(wish.nodes, int(wish.factor * match + wish.offset))


def test_width_1_drafts_the_path_of_the_most_frequent_children() -> None:
    rng, tree = np.random.default_rng(3), SuffixTree(depth=10)
    text = tree.begin()
    for _ in range(100):
        tree.extend(text, rng.integers(0, 3, 3).tolist())
        draft = tree.draft(text, DraftLimits(9, 9, 1.0, 0.0, 0.1, 1))
        assert draft.parents.tolist() == list(range(-1, len(draft.tokens) - 1))
        string = held(tree)[0][-draft.match :]
        for token in draft.tokens.tolist():
            counts = [tree.count([*string, other]) for other in range(3)]
            assert tree.count([*string, token]) == max(counts)
            string.append(token)


def test_at_least_leaves_weaker_drafts_out() -> None:
    tree = SuffixTree(depth=8)
    text = tree.begin()
    tree.extend(text, [1, 2, 3, 4, 1, 2])
    wish = DraftLimits(8, 8, 1.0, 0.0, 0.1, 8)
    draft = tree.draft(text, wish)
    assert draft.tokens.tolist() == [3, 4] and draft.score == 2 and draft.match == 2
    assert tree.draft(text, wish, at_least=1.9) is not None
    assert tree.draft(text, wish, at_least=2.0) is None


def test_memory_is_bounded_and_keeps_the_latest_texts() -> None:
    rng = np.random.default_rng(1)
    tree = SuffixTree(depth=8, budget=200_000)
    said = []
    for _ in range(60):
        said.append(rng.integers(0, 50, 200).tolist())
        text = tree.begin()
        tree.extend(text, said[-1])
        tree.end(text)
        assert tree.nbytes <= 200_000
    kept = held(tree)
    assert 4 < len(kept) < 60 and kept == said[-len(kept) :]
    assert tree.evicted == 60 - len(kept)
    check(tree)


def test_a_text_beyond_the_budget_loses_its_beginning() -> None:
    rng = np.random.default_rng(2)
    tree, said = SuffixTree(depth=8, budget=60_000), rng.integers(0, 50, 5000).tolist()
    text = tree.begin()
    for start in range(0, 5000, 100):
        tree.extend(text, said[start : start + 100])
        assert tree.nbytes <= 60_000
    (kept,) = held(tree)
    assert 0 < len(kept) < 5000 and kept == said[-len(kept) :]
    check(tree)


def test_repeated_texts_need_pages_but_no_nodes() -> None:
    tree = SuffixTree(depth=8, budget=300_000)
    for _ in range(400):
        text = tree.begin()
        tree.extend(text, list(range(100)))
        tree.end(text)
    assert tree.evicted < 400 and tree.num_nodes < 1000 and tree.nbytes <= 300_000
    assert tree.count([5, 6, 7]) == len(tree.texts)


def test_at_most_so_many_texts() -> None:
    tree = SuffixTree(depth=4, most=2)
    for token in range(5):
        tree.extend(tree.begin(), [token, token])
    assert held(tree) == [[3, 3], [4, 4]]


def test_bad_options() -> None:
    for options in ({"depth": 1}, {"depth": 65}, {"most": 0}, {"budget": 1000}):
        with pytest.raises(ConfigError):
            SuffixTree(**options)
