"""Both dice follow the law they are asked for, and seeded ones repeat themselves."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from forerun.core.dice import EnumeratedDice, SeededDice

WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)


def plackett_luce(q: np.ndarray, order: tuple[int, ...]) -> float:
    """Probability of an order drawn without replacement, by its definition."""
    prob, left = 1.0, float(q.sum())
    for i in order:
        prob *= q[i] / left
        left -= q[i]
    return prob


def outcome_law(program) -> dict:
    found: dict = defaultdict(float)
    for value, probability in EnumeratedDice().outcomes(program):
        found[value] += probability
    return found


@settings(deadline=None)
@given(WEIGHTS, WEIGHTS, st.floats(0, 1))
def test_enumerated_outcomes_have_total_probability_one(first, second, heads):
    def program(dice):
        if dice.coin(heads):
            return dice.choice(np.array(first, float))
        return tuple(dice.without_replacement(np.array(second, float), 2))

    assert sum(outcome_law(program).values()) == pytest.approx(1.0, abs=1e-12)


@settings(deadline=None)
@given(WEIGHTS)
def test_enumerated_choice_has_the_law_it_was_given(weights):
    probs = np.array(weights, float)
    found = outcome_law(lambda dice: dice.choice(probs))
    for i, weight in enumerate(weights):
        assert found.get(i, 0.0) == pytest.approx(weight / sum(weights), abs=1e-12)


def test_enumeration_reaches_every_branch_of_a_program_whose_length_varies():
    def program(dice):
        count = 0
        while count < 3 and dice.coin(0.25):
            count += 1
        return count

    found = outcome_law(program)
    expected = {0: 0.75, 1: 0.75 / 4, 2: 0.75 / 16, 3: 1 / 64}
    assert found == pytest.approx(expected, abs=1e-15)


def test_enumerated_draws_without_replacement_follow_plackett_luce():
    q = np.array([0.5, 0.3, 0.0, 0.2])
    found = outcome_law(lambda dice: tuple(dice.without_replacement(q, 3)))
    expected = {order: plackett_luce(q, order) for order in itertools.permutations((0, 1, 3))}
    assert found == pytest.approx(expected, abs=1e-12)


def test_seeded_draws_without_replacement_follow_plackett_luce():
    q, dice, count = np.array([0.5, 0.3, 0.0, 0.2]), SeededDice(7), 20_000
    found = Counter(tuple(dice.without_replacement(q, 2)) for _ in range(count))
    pairs = list(itertools.permutations((0, 1, 3), 2))
    expected = [count * plackett_luce(q, pair) for pair in pairs]
    assert set(found) <= set(pairs)
    assert stats.chisquare([found[pair] for pair in pairs], expected).pvalue > 1e-3


def test_seeded_choice_and_coin_follow_their_law():
    probs, dice, count = np.array([0.0, 3.0, 1.0, 0.0, 4.0]), SeededDice(3), 20_000
    found = Counter(dice.choice(probs) for _ in range(count))
    expected = [count * w / 8 for w in (3, 1, 4)]
    assert set(found) == {1, 2, 4}
    assert stats.chisquare([found[i] for i in (1, 2, 4)], expected).pvalue > 1e-3
    heads = sum(dice.coin(0.3) for _ in range(count))
    assert stats.binomtest(heads, count, 0.3).pvalue > 1e-3


@settings(deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 50))
def test_same_seed_same_stream(seed, index):
    def play(dice):
        probs = np.array([0.2, 0.3, 0.5])
        return [dice.choice(probs), dice.coin(0.5), dice.without_replacement(probs, 3)]

    assert play(SeededDice(seed, index)) == play(SeededDice(seed, index))


def test_trajectories_of_one_seed_have_streams_of_their_own():
    streams = {tuple(SeededDice(11, prompt, k).peek(4)) for prompt in range(20) for k in range(20)}
    assert len(streams) == 400


@settings(deadline=None)
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=5))
def test_peeking_never_changes_the_stream(counts):
    plain = SeededDice(5)
    expected = [plain.uniform() for _ in range(sum(counts))]
    dice, seen = SeededDice(5), []
    for count in counts:
        dice.peek(2 * count)
        seen += dice.peek(count).tolist()
        dice.skip(count)
    assert seen == expected


def test_every_uniform_serves_once():
    dice = SeededDice(1)
    first = dice.peek(3).copy()
    dice.without_replacement(np.ones(3), 1)
    assert not set(first) & set(dice.peek(3))


def test_certain_events_are_certain():
    dice = SeededDice(2)
    assert all(dice.coin(1.0) for _ in range(1000))
    assert not any(dice.coin(0.0) for _ in range(1000))
    assert {dice.choice(np.array([0.0, 1.0, 0.0])) for _ in range(1000)} == {1}
    assert dice.without_replacement(np.array([0.0, 1.0, 2.0]), 9) in ([1, 2], [2, 1])
