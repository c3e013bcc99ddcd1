"""The suffix automaton against scans of all texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.ngrams.tables.suffix.automaton import Generations, SuffixAutomaton, warm_up


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm_up()


def places(texts: list[list[int]], string: list[int]) -> list[tuple[int, int]]:
    """(text, index of what follows) of every occurrence that something follows."""
    size = len(string)
    return [
        (which, end)
        for which, text in enumerate(texts)
        for end in range(size, len(text))
        if text[end - size : end] == string
    ]


def longest(texts: list[list[int]], read: list[int]) -> int:
    """Length of the longest suffix of what was read that goes on somewhere."""
    return next(n for n in range(len(read), -1, -1) if n == 0 or places(texts, read[-n:]))


@pytest.mark.parametrize("seed", range(40))
def test_match_is_the_longest_though_others_grow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    automaton, texts, said = SuffixAutomaton(latest=bool(seed % 2)), [], []
    vocab = int(rng.integers(1, 5))
    for _ in range(40):
        if not texts or rng.random() < 0.2:
            texts.append(automaton.begin())
            said.append([])
        which = int(rng.integers(len(texts)))
        new = rng.integers(0, vocab, rng.integers(1, 6)).tolist()
        automaton.extend(texts[which], new)
        said[which] += new
        automaton.check_integrity()
        for text, own in zip(texts, said, strict=True):
            match = automaton.match(text)
            assert match == longest(said, own)
            copied = automaton.following(text, 10).tolist()
            if match:
                found = places(said, own[-match:])
                assert copied in [said[i][end : end + 10] for i, end in found] and copied
    substrings = {
        tuple(t[i:j]) for t in said for i in range(len(t)) for j in range(i + 1, len(t) + 1)
    }
    assert automaton.num_substrings() == len(substrings)
    assert [text.tolist() for text in automaton.all_texts()] == [text for text in said if text]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_one_text_has_few_states_and_edges(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(automaton.begin(), text)
    assert automaton.num_states() <= max(2, 2 * len(text) - 1)
    assert automaton.auto.used[1] <= max(3, 3 * len(text) - 4)
    automaton.check_integrity()


@pytest.mark.parametrize("latest", [False, True])
def test_draft_is_what_followed_the_first_or_the_latest_place(latest: bool) -> None:
    rng = np.random.default_rng(0)
    automaton = SuffixAutomaton(latest=latest)
    text, said = automaton.begin(), []
    for _ in range(400):
        said.append(int(rng.integers(0, 3)))
        automaton.extend(text, said[-1:])
        match = automaton.match(text)
        if match:
            found = [end for _, end in places([said], said[-match:])]
            end = found[-1] if latest else found[0]
            assert automaton.following(text, 7).tolist() == said[end : end + 7]


def test_short_continuations_give_way_to_those_of_shorter_matches() -> None:
    automaton = SuffixAutomaton()
    text = automaton.begin()
    automaton.extend(text, [7, 1, 2, 3, 4, 5, 6, 8, 7, 9, 8, 7])
    assert automaton.match(text) == 2  # "8 7", which "9 8 7" follows
    assert automaton.following(text, 9).tolist() == [9, 8, 7]
    assert automaton.following(text, 9, enough=9).tolist() == [1, 2, 3, 4, 5, 6, 8, 7, 9]


def test_a_cursor_listens_without_writing() -> None:
    automaton = SuffixAutomaton()
    automaton.extend(automaton.begin(), [1, 2, 3, 4])
    text = automaton.begin([9, 2])
    assert automaton.following(text, 5).tolist() == [3, 4]
    automaton.move_cursor(text, [3])
    assert automaton.match(text) == 2 and len(automaton) == 4
    automaton.move_cursor(text, [4])
    assert automaton.match(text) == 0  # nothing follows
    assert automaton.largest() == 4


@pytest.mark.parametrize("seed", range(10))
def test_room_for_new_states_and_edges_keeps_what_is_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    said = rng.integers(0, 40, 3000).tolist()
    whole, pieces = SuffixAutomaton(), SuffixAutomaton()
    text, other = whole.begin(), pieces.begin()
    whole.extend(text, said)
    for start in range(0, 3000, 7):
        pieces.extend(other, said[start : start + 7])
    pieces.check_integrity()
    assert whole.num_substrings() == pieces.num_substrings()
    assert np.array_equal(
        whole.auto.states[: whole.num_states()], pieces.auto.states[: pieces.num_states()]
    )


def test_memory_is_bounded_and_keeps_the_latest_half() -> None:
    rng, budget = np.random.default_rng(1), 400_000
    memory, said = Generations(budget=budget), []
    running = memory.begin()
    for _ in range(80):
        said.append(rng.integers(0, 30, 150).tolist())
        place = memory.begin(said[-1][:5])
        memory.extend(place, said[-1])
        memory.end(place)
        memory.extend(running, [3])
        assert memory.nbytes <= budget
        for automaton, text in memory.places(place):
            assert automaton.match(text) <= 150
    pieces = [text.tolist() for text in memory.all_texts() if set(text.tolist()) != {3}]
    kept, everything = sum(pieces, []), sum(said, [])
    assert 1000 < len(kept) < len(everything) and kept == everything[-len(kept) :]
    assert sum(map(len, memory.all_texts())) == len(memory)


def test_matches_go_on_across_generations() -> None:
    rng = np.random.default_rng(1)
    memory = Generations(budget=200_000)
    phrase = [100, 101, 102, 103, 104, 105]
    place = memory.begin()
    memory.extend(place, phrase)
    era = memory.era
    while memory.era == era:
        memory.extend(place, rng.integers(0, 90, 10).tolist())
    memory.extend(place, phrase[:4])
    (young, text), (old, before) = memory.places(place)
    assert old.following(before, 2).tolist() == [104, 105]
    assert young.match(text) < old.match(before) == 4


def test_a_budget_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise the budget"):
        Generations(budget=1000)
