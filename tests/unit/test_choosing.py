"""The compiled arithmetic of a decision against NumPy, line by line what the docstrings say."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.controllers._acceptance import DECAY, MAX_WEIGHT, Acceptance
from forerun.controllers._tree_size import PRIOR_TRIALS, RECENT, choose, node_estimates
from forerun.core.cost import Cost
from forerun.core.mixins import Priced
from forerun.core.roles import Drafter

NODES = 32
Drafts = list[tuple[int, int, list[int]]]  # asked, made, accepted


def believe(counts: np.ndarray, weight: float, first: float, below: float) -> np.ndarray:
    found = np.full(counts.shape, np.nan)
    node_estimates(counts, weight, first, below, found)
    return found


def drafts(rng: np.random.Generator, num: int) -> Drafts:
    asked = rng.integers(1, NODES + 1, num).tolist()
    sizes = [int(rng.integers(1, most + 1)) for most in asked]
    chance = rng.uniform(0.2, 0.95)
    accepted = [[i for i in range(n) if rng.random() < chance ** (1 + i / 4)] for n in sizes]
    return list(zip(asked, sizes, accepted, strict=True))


def counted(given: Drafts) -> Acceptance:
    counts = Acceptance(Drafter(), NODES, 1)
    for asked, size, accepted in given:
        counts.add(asked, size, accepted)
    counts.update(1)
    return counts


def plain_estimates(given: Drafts, first: float, below: float) -> np.ndarray:
    """[3, NODES + 1], from arrays that fade draft by draft."""
    asked, tries, hits = (np.zeros(NODES) for _ in range(3))
    for most, size, accepted in given:
        asked[: max(most, size)] += 1
        tries[:size] += 1
        hits[accepted] += 1
        for counts in (asked, tries, hits):
            counts *= DECAY
    recent, found = first / below, np.zeros((3, NODES + 1))
    for i in range(NODES):
        rate = (hits[i] + PRIOR_TRIALS * below * recent) / (tries[i] + PRIOR_TRIALS)
        recent = rate if i == 0 else (1 - RECENT) * recent + RECENT * rate
        found[0, i] = rate
    found[1, :NODES] = np.minimum.accumulate((tries + PRIOR_TRIALS) / (asked + PRIOR_TRIALS))
    found[2, 1:] = found[0, :NODES].cumsum()
    return found


def plain_choice(
    estimates: np.ndarray, prices: np.ndarray, num: int, roots: int, cost: Cost, margin: float
) -> tuple[list[int], float, float]:
    rates, made = estimates[:, 0, :NODES], estimates[:, 1, :NODES]
    factors, each, per_node = prices[:, :1], prices[:, 1], prices[:, 2:]
    dear = made * per_node
    dear[:, 0] += each
    falling = np.minimum.accumulate(rates, axis=1)
    order = np.argsort(-(factors * falling).ravel(), kind="stable")
    hoped, rows, beside = (
        part.ravel()[order].cumsum() for part in (factors * made * rates, made, dear)
    )
    passes = cost.at(roots + rows)
    spent = passes + beside + cost.overhead(num, 1) - cost.per_draft
    speeds = (num + hoped) / spent
    best = int(speeds.argmax())
    plain = num / (cost.pass_time(roots) + cost.overhead(num, 0))
    if num + (1 - margin) * hoped[best] <= plain * spent[best]:
        return [0] * len(estimates), 0.0, 0.0
    taken = order[: best + 1]
    first = roots + int((taken % NODES == 0).sum())
    per_row = (passes[best] - cost.pass_time(first)) / max(roots + rows[best] - first, 1)
    sizes = np.bincount(taken // NODES, minlength=len(estimates))
    return sizes.tolist(), float(per_row), float(speeds[best])


def some_cost(rng: np.random.Generator) -> Cost:
    rows = [1, *sorted(rng.choice(np.arange(2, 140), 5, replace=False).tolist())]
    steps = [rng.choice([0.01, 0.05, 0.2, 0.6]) * more**0.8 for more in np.diff(rows)]
    draft, drafting = rng.uniform(0, 0.2, 2)
    seconds = np.cumsum([1.0, *steps]).tolist()
    return Cost(tuple(rows), tuple(seconds), 0.01, 0.01, draft, drafting, 0.05, 0.05)


@pytest.mark.parametrize("seed", range(40))
def test_both_are_what_numpy_computes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost, num = some_cost(rng), int(rng.integers(1, 17))
    given = [drafts(rng, int(rng.integers(0, 300))) for _ in range(num)]
    estimates = np.array([counted(one).estimates for one in given])
    hope = Priced().acceptance_prior()
    np.testing.assert_allclose(estimates, [plain_estimates(one, *hope) for one in given], rtol=1e-9)
    prices = rng.uniform([0.3, 0.0, 0.0], [2.0, 0.1, 0.02], (num, 3))
    num += int(rng.integers(0, 3))
    roots = num - int(rng.integers(0, num)) if seed % 2 else num  # some texts are the same
    sizes, per_row, speed = choose(
        estimates,
        prices,
        num,
        roots,
        np.array(cost.rows, float),
        np.array(cost.seconds),
        cost.overhead(num, 1) - cost.per_draft,
        num / (cost.pass_time(roots) + cost.overhead(num, 0)),
        0.2,
    )
    wanted = plain_choice(estimates, prices, num, roots, cost, 0.2)
    assert sizes.tolist() == wanted[0]
    assert (per_row, speed) == pytest.approx(wanted[1:], rel=1e-9)


def chosen(estimates: np.ndarray, prices: list[list[float]], row: float) -> list[int]:
    """Of passes that cost 1 and so much for every row more."""
    curve = np.array([1.0, 101.0]), np.array([1.0, 1.0 + 100 * row])
    num = len(prices)
    return choose(estimates, np.array(prices), num, num, *curve, 0.0, 1.0, 0.2)[0].tolist()


def test_it_drafts_where_rows_are_cheap_and_not_where_they_are_dear() -> None:
    estimates = np.array([believe(np.zeros((3, NODES + 1)), 1.0, 0.5, 0.8)])
    one = [1.0, 0.0, 0.0]
    assert chosen(estimates, [one], 0.0) == [NODES]
    few = chosen(estimates, [one], 0.1)[0]
    assert 0 < few < NODES
    # 1 + .5 + .4 + ... tokens of 1 + .1 N seconds: the best N, one by one
    speeds = [(1 + estimates[0, 2, n]) / (1 + 0.1 * n) for n in range(NODES + 1)]
    assert few == int(np.argmax(speeds))
    assert chosen(estimates, [one], 0.6) == [0]


def test_of_equally_likely_nodes_those_of_the_first_sequence_come_first() -> None:
    one = believe(np.zeros((3, 3)), 1.0, 0.5, 1.0)  # both nodes as likely
    step = np.array([1.0, 3.0, 4.0, 100.0]), np.array([1.0, 1.0, 10.0, 1000.0])
    prices = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    sizes, *_ = choose(np.array([one, one]), prices, 2, 2, *step, 0.0, 1.0, 0.2)
    assert sizes.tolist() == [1, 0]


def test_a_single_node_is_enough_of_a_tree() -> None:
    estimates = np.array([believe(np.zeros((3, 2)), 1.0, 0.5, 0.8)])
    assert chosen(estimates, [[1.0, 0.0, 0.0]], 0.01) == [1]


@pytest.mark.parametrize("price", [np.inf, np.nan])
def test_a_drafter_of_no_price_drafts_nothing(price: float) -> None:
    estimates = np.array([believe(np.zeros((3, NODES + 1)), 1.0, 0.5, 0.8)])
    assert chosen(estimates, [[1.0, price, 0.0]], 0.0) == [0]


def test_counts_of_more_nodes_than_there_may_be_and_of_many_drafts() -> None:
    counts = Acceptance(Drafter(), 8, 1)
    for _ in range(20_000):
        counts.add(9, 9, [0])
    counts.update(1)
    assert np.isfinite(counts.estimates).all() and counts.estimates[0, 0] > 0.5


def test_weights_that_grow_large_are_scaled_down() -> None:
    given = drafts(np.random.default_rng(1), 12_000)
    scaled = Acceptance(Drafter(), NODES, 1)
    for i, (asked, size, accepted) in enumerate(given):
        scaled.add(asked, size, accepted)
        if i % 50 == 0:
            scaled.update(1)
    scaled.update(1)
    assert DECAY ** -len(given) > MAX_WEIGHT
    np.testing.assert_allclose(scaled.estimates, counted(given).estimates, rtol=1e-9)


def test_nothing_counted_is_what_is_hoped() -> None:
    found = believe(np.zeros((3, 4)), 1.0, 0.5, 0.8)
    third = 0.8 * (0.75 * 0.5 + 0.25 * 0.4)
    np.testing.assert_allclose(found[0], [0.5, 0.4, third, 0.0])
    np.testing.assert_allclose(found[1], [1.0, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(found[2], [0.0, 0.5, 0.9, 0.9 + third])
