"""Prompt lookup against a scan of the whole text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.sampling import Sampling
from forerun.core.tree import POINT
from forerun.drafters.prompt_lookup import Index, PromptLookup
from forerun.errors import ConfigError


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(list(tokens), len(tokens), Sampling(), SeededDice(0), limit=1000)


def scan(text: list[int], ngram: int, tokens: int, match: str, allow_short: bool) -> list[int]:
    """The definition: longest n first, then the first or last place with enough text after it."""
    for n in range(min(ngram, len(text)), 0, -1):
        ends = [
            end
            for end in range(n, len(text))
            if text[end - n : end] == text[-n:] and (allow_short or end + tokens <= len(text))
        ]
        if ends:
            end = ends[0] if match == "first" else ends[-1]
            return text[end : end + tokens]
    return []


OPTIONS = list(itertools.product((1, 2, 3), (1, 4, 10), ("first", "last"), (True, False)))


@pytest.mark.parametrize(("ngram", "tokens", "match", "allow_short"), OPTIONS)
def test_equals_a_scan(ngram: int, tokens: int, match: str, allow_short: bool) -> None:
    options = {"ngram": ngram, "tokens": tokens, "match": match, "allow_short": allow_short}
    rng = np.random.default_rng([ngram, tokens])
    found = 0
    for _ in range(4):
        drafter = PromptLookup(**options)
        vocab = int(rng.integers(2, 6))
        seq = sequence(rng.integers(0, vocab, rng.integers(1, 20)).tolist())
        while len(seq.tokens) < 100:
            tree = drafter.propose([seq], [Plan(nodes=50, depth=50)], [seq.dice])[0]
            assert tree.tokens.tolist() == scan(seq.tokens, **options)
            found += len(tree)
            seq.tokens += rng.integers(0, vocab, rng.integers(1, 6)).tolist()
    assert found


def test_example() -> None:
    a, b, c, d, e = range(5)
    seq = sequence([a, b, c, d, e, e, a, b])
    tree = PromptLookup(ngram=2).propose([seq], [Plan(nodes=3, depth=9)], [seq.dice])[0]
    assert tree.tokens.tolist() == [c, d, e]
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.laws.tolist() == [POINT] * 3


@pytest.mark.parametrize(("nodes", "depth", "size"), [(2, 9, 2), (9, 2, 2), (9, 9, 6), (0, 9, 0)])
def test_is_bounded_by_the_plan_and_by_the_text(nodes: int, depth: int, size: int) -> None:
    seq = sequence([1, 2, 3, 4, 5, 6, 1])
    tree = PromptLookup().propose([seq], [Plan(nodes=nodes, depth=depth)], [seq.dice])[0]
    assert len(tree) == size


def test_never_proposes_the_query_itself() -> None:
    seq = sequence([1, 2, 3])
    assert len(PromptLookup().propose([seq], [Plan()], [seq.dice])[0]) == 0


def test_state_follows_tokens_that_were_changed() -> None:
    rng = np.random.default_rng(1)
    drafter, seq = PromptLookup(), sequence(rng.integers(0, 3, 60).tolist())
    for cut in (50, 20, 1):
        drafter.propose([seq], [Plan(nodes=12)], [seq.dice])[0]
        del seq.tokens[cut:]
        seq.tokens += rng.integers(0, 3, 40).tolist()
        drafter.observe(Step([seq], [], [], [], [], []))
        tree = drafter.propose([seq], [Plan(nodes=12)], [seq.dice])[0]
        assert tree.tokens.tolist() == scan(seq.tokens, 3, 10, "last", True)


def test_a_sequence_that_drafts_is_read_after_its_steps() -> None:
    drafter, asked, other = PromptLookup(), sequence([1, 2, 3]), sequence([1, 2, 3])
    drafter.propose([asked], [Plan()], [asked.dice])[0]
    for seq in (asked, other):
        seq.tokens += [4, 5, 6]
        drafter.observe(Step([seq], [], [], [], [], []))
    assert drafter.memory_report()["prompt lookup index"] == 12 * (120 + 24)  # 5 + 4 + 3 n-grams


def test_sequences_do_not_share_and_are_forgotten() -> None:
    drafter = PromptLookup()
    one, two = sequence([1, 2, 3, 1, 2]), sequence([4, 1, 2])
    trees = drafter.propose([one, two], [Plan(), Plan()], [one.dice, two.dice])
    assert [tree.tokens.tolist() for tree in trees] == [[3, 1, 2], []]
    assert drafter.memory_report()["prompt lookup index"] > 0
    drafter.finish(one)
    drafter.finish(two)
    assert drafter.memory_report()["prompt lookup index"] == 0


def test_work_per_token_does_not_grow_with_the_text() -> None:
    class Counted(list):
        slices = 0

        def __getitem__(self, key: object) -> object:
            Counted.slices += 1
            return super().__getitem__(key)

    text, index = Counted(np.random.default_rng(0).integers(0, 9, 4000).tolist()), Index(3, 1, True)
    index.extend(text)
    for _ in range(100):
        text.append(5)
        Counted.slices = 0
        assert index.fits(text)
        index.extend(text)
        assert Counted.slices <= 5


def test_bad_options() -> None:
    for options in ({"ngram": 0}, {"tokens": 0}, {"match": "best"}):
        with pytest.raises(ConfigError):
            PromptLookup(**options)
