"""AWRS: the published table, weights per token and the masked law, all by enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.constraints import awrs
from forerun.constraints._urn import Urn
from forerun.constraints.awrs import NO_TOKEN, draw
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.errors import ConfigError, UnknownName

TABLE = {  # p, allowed -> method -> E[w], Var w, E[tests]
    "mass-0.5": (
        ((0.5, 0.3, 0.2), {1, 2}),
        {
            "recursive": (0.5, 0.06, 2.5),
            "two_run": (0.5, 0.09375, 2.23),
            "geometric": (0.5, 0.096574, 2.23),
            "geometric, 3 accepts": (0.5, 0.056853, None),
        },
    ),
    "mass-0.8": (
        ((0.5, 0.3, 0.2), {0, 1}),
        {
            "recursive": (0.8, 0.06, 2.2),
            "two_run": (0.8, 0.072, 1.82875),
            "geometric": (0.8, 0.074059, 1.82875),
            "geometric, 3 accepts": (0.8, 0.047525, None),
        },
    ),
    "mass-0.4": (
        ((0.4, 0.3, 0.2, 0.1), {1, 3}),
        {
            "recursive": (0.4, 0.05, 2.833333),
            "two_run": (0.4, 0.082296, 2.680556),
            "geometric": (0.4, 0.084344, 2.680556),
            "geometric, 3 accepts": (0.4, 0.047541, None),
        },
    ),
}
CASES = [(case, method) for case, (_, rows) in TABLE.items() for method in rows]
Outcome = tuple[int, float, float, int, float]  # token, w, w ** 2, tests, probability
Drawn = tuple[int, float]
Rule = Callable[[np.ndarray, Callable[[int], bool], EnumeratedDice], Drawn]


def outcomes(p: tuple[float, ...], allowed: set[int], rule: Rule) -> list[Outcome]:
    """Every outcome of a rule: token, w, w ** 2, number of tests, and probability."""

    def program(dice: EnumeratedDice) -> tuple[int, float, float, int]:
        tested = []

        def ok(token: int) -> bool:
            tested.append(token)
            return token in allowed

        token, logw = rule(np.log(p), ok, dice)
        assert len(set(tested)) == len(tested)  # cached within the step
        return token, math.exp(logw), math.exp(2 * logw), len(tested)

    return [(*found, prob) for found, prob in EnumeratedDice().outcomes(program)]


def without_repeats(
    p: tuple[float, ...], allowed: set[int], accepts: int, patch: pytest.MonkeyPatch
) -> list[Outcome]:
    """The same for "geometric", with the counts of repeated rejections integrated.

    Their sum does not steer the draws; it only adds to the draws n in w = (A - 1) / (n - 1).
    """
    lefts: list[float] = []
    patch.setattr(awrs, "_num_repeats", lambda log_left, dice: lefts.append(log_left) or 0)
    counts = np.arange(2000)

    def program(dice: EnumeratedDice) -> tuple[int, float, float, int]:
        lefts.clear()
        tested: set[int] = set()
        ok = lambda token: bool(tested.add(token)) or token in allowed  # noqa: E731
        token, logw = draw(np.log(p), ok, dice, method="geometric", max_accepts=accepts)
        num_more = np.eye(1, len(counts))[0]
        for left in map(math.exp, lefts):
            num_more = np.convolve(num_more, left * (1 - left) ** counts)[: len(counts)]
        w = (accepts - 1) / ((accepts - 1) / math.exp(logw) + counts)
        return token, float(num_more @ w), float(num_more @ w**2), len(tested)

    return [(*found, prob) for found, prob in EnumeratedDice().outcomes(program)]


def table_row(case: str, method: str, patch: pytest.MonkeyPatch) -> list[Outcome]:
    p, allowed = TABLE[case][0]
    if method.startswith("geometric"):
        return without_repeats(p, allowed, 3 if "3" in method else 2, patch)
    return outcomes(p, allowed, lambda logp, ok, dice: draw(logp, ok, dice, method=method))


@pytest.mark.parametrize(("case", "method"), CASES)
def test_the_table_of_the_sheet(case: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mean, variance, tests = TABLE[case][1][method]
    found = table_row(case, method, monkeypatch)
    first = sum(w * prob for _, w, _, _, prob in found)
    second = sum(square * prob for _, _, square, _, prob in found)
    assert first == pytest.approx(mean, abs=1e-9)
    assert second - first**2 == pytest.approx(variance, abs=6e-7)
    if tests is not None:
        assert sum(n * prob for *_, n, prob in found) == pytest.approx(tests, abs=6e-7)


def check_tokens(p: tuple[float, ...], allowed: set[int], found: list[Outcome]) -> None:
    """E[w 1{x}] = p(x) ok(x), and the token has the masked law."""
    mass = sum(p[t] for t in allowed)
    for token, prob in enumerate(p):
        exact = prob if token in allowed else 0.0
        share = sum(w * chance for x, w, _, _, chance in found if x == token)
        law = sum(chance for x, *_, chance in found if x == token)
        assert share == pytest.approx(exact, abs=1e-9)
        assert law == pytest.approx(exact / mass, abs=1e-9)


@pytest.mark.parametrize(("case", "method"), CASES)
def test_weights_per_token_and_law(case: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tokens(*TABLE[case][0], table_row(case, method, monkeypatch))


def test_the_count_of_repeats_is_geometric() -> None:
    for left in (0.5, 0.9, 0.2):
        found = np.zeros(4096)
        for count, prob in EnumeratedDice().outcomes(
            lambda dice, left=left: awrs._num_repeats(math.log(left), dice)
        ):
            found[count] += prob
        assert np.allclose(found, left * (1 - left) ** np.arange(4096), atol=1e-12)


def test_geometric_as_a_whole_is_unbiased() -> None:
    p, allowed = (0.5, 0.3, 0.2), {0, 1}
    rule = lambda logp, ok, dice: draw(logp, ok, dice, method="geometric")  # noqa: E731
    check_tokens(p, allowed, outcomes(p, allowed, rule))


@pytest.mark.parametrize("method", ["recursive", "geometric"])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_limit_of_rejections_keeps_the_expectation(method: str, most: int) -> None:
    p, allowed = (0.4, 0.3, 0.2, 0.1), {1, 3}
    found = outcomes(
        p, allowed, lambda logp, ok, dice: draw(logp, ok, dice, method=method, max_rejects=most)
    )
    for token, prob in enumerate(p):
        share = sum(w * chance for x, w, _, _, chance in found if x == token)
        assert share == pytest.approx(prob if token in allowed else 0.0, abs=1e-12)
    assert most > 2 or any(x == NO_TOKEN and w == 0.0 for x, w, *_ in found)


def wrong_two_run(logp: np.ndarray, ok: Callable[[int], bool], dice: EnumeratedDice) -> Drawn:
    """Counts the rejections of the second run only."""
    urn = Urn(logp)
    x, _ = awrs._until_accepted(urn, ok, dice)
    left = urn.log_left
    _, num_rejected = awrs._until_accepted(urn, ok, dice)
    return x, left - math.log(1 + num_rejected)


def unweighted(logp: np.ndarray, ok: Callable[[int], bool], dice: EnumeratedDice) -> Drawn:
    """Plain adaptive rejection: the masked law with weight 1."""
    return awrs._until_accepted(Urn(logp), ok, dice)[0], 0.0


def without_next(logp: np.ndarray, ok: Callable[[int], bool], dice: EnumeratedDice) -> Drawn:
    """The recursive rule without a test of the next token."""
    urn = Urn(logp)
    x, _ = awrs._until_accepted(urn, ok, dice)
    return x, urn.log_left


def with_one_order(logp: np.ndarray, ok: Callable[[int], bool], dice: EnumeratedDice) -> Drawn:
    """The geometric rule with one order for all accepts: an accepted token never comes again."""
    urn, first, num_accepted, num_rejected = Urn(logp), NO_TOKEN, 0, 0
    while num_accepted < 2 and not urn.is_empty:
        x = urn.draw(dice)
        urn.remove(x)
        num_accepted, num_rejected = num_accepted + ok(x), num_rejected + (not ok(x))
        first = x if ok(x) and first == NO_TOKEN else first
    return first, -math.log(num_accepted + num_rejected - 1)


def uncached(rule: Rule) -> Rule:
    return lambda logp, ok, dice: rule(logp, awrs._cached(ok), dice)


@pytest.mark.parametrize(
    ("rule", "mean"),
    [(wrong_two_run, 0.625), (unweighted, 1.0), (without_next, 0.75), (with_one_order, None)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_wrong_rules_are_caught(rule: Rule, mean: float | None) -> None:
    p, allowed = (0.5, 0.3, 0.2), {1, 2}
    found = outcomes(p, allowed, uncached(rule))
    with pytest.raises(AssertionError):
        check_tokens(p, allowed, found)
    if mean is not None:
        assert sum(w * chance for _, w, _, _, chance in found) == pytest.approx(mean)


def test_auto_takes_geometric_where_one_allowed_token_leads() -> None:
    def same(p: tuple[float, ...], allowed: set[int], method: str) -> bool:
        dice = [SeededDice(5), SeededDice(5)]
        ok = lambda token: token in allowed  # noqa: E731
        runs = [
            [draw(np.log(p), ok, d, method=m) for _ in range(50)]
            for d, m in zip(dice, ("auto", method), strict=True)
        ]
        return runs[0] == runs[1]

    assert same((0.7, 0.2, 0.1), {0, 1}, "geometric")
    assert not same((0.7, 0.2, 0.1), {0, 1}, "recursive")
    assert same((0.7, 0.2, 0.1), {1, 2}, "recursive")  # the leading one is not allowed
    assert same((0.6, 0.3, 0.1), {0, 1}, "recursive")


@pytest.mark.parametrize("method", ["recursive", "two_run"])
def test_a_proposal_is_corrected(method: str) -> None:
    """Drawn from q, the weight still estimates p; q need not be normalised."""
    p, q, allowed = (0.5, 0.3, 0.2), np.array([0.2, 0.2, 0.6]), {0, 2}
    found = outcomes(
        p,
        allowed,
        lambda logp, ok, dice: draw(logp, ok, dice, method=method, logq=np.log(q) + 3.0),
    )
    for token, prob in enumerate(p):
        share = sum(w * chance for x, w, _, _, chance in found if x == token)
        assert share == pytest.approx(prob if token in allowed else 0.0, abs=1e-12)
    law = sum(chance for x, *_, chance in found if x == 0)
    assert law == pytest.approx(0.25, abs=1e-12)  # the masked law of q


def test_a_part_of_the_vocabulary_is_corrected() -> None:
    """Four tokens, of which only the first three are offered."""
    p, allowed = np.array([0.4, 0.3, 0.2, 0.1]), {1, 2}
    found = outcomes(
        tuple(p[:3] / 0.9),
        allowed,
        lambda logp, ok, dice: draw(logp, ok, dice, method="recursive", kept_mass=0.9),
    )
    assert sum(w * c for x, w, _, _, c in found if x == 1) == pytest.approx(0.3)
    assert sum(w * c for x, w, _, _, c in found) == pytest.approx(0.5)


@pytest.mark.parametrize("method", awrs.METHODS)
def test_nothing_allowed_has_weight_0(method: str) -> None:
    assert draw(np.zeros(7), lambda _: False, SeededDice(0), method=method) == (-1, -math.inf)


@pytest.mark.parametrize("method", awrs.METHODS)
def test_a_single_token_of_tiny_mass(method: str) -> None:
    """Masses far below the smallest float, and far below the rounding error of 1."""
    for logp in (-30.0, -60.0, -900.0):
        law = np.zeros(9)
        law[4] = logp
        token, logw = draw(law, lambda t: t == 4, SeededDice(1), method=method)
        assert token == 4 and math.isfinite(logw) and logw < -20
    law = np.full(9, -np.inf)
    law[4] = -5.0
    token, logw = draw(law, lambda t: t == 4, SeededDice(1), method=method)
    assert (token, logw) == (4, pytest.approx(0.0))


def test_the_weight_of_a_tiny_mass_is_exact() -> None:
    law = np.log(np.array([1 - 1e-13, 0.6e-13, 0.4e-13]))
    for _ in range(20):
        token, logw = draw(law, lambda t: t > 0, SeededDice(2), method="recursive")
        assert logw == pytest.approx(math.log(1e-13), abs=1e-3) and token > 0


def test_a_mask_ends_a_long_search_and_keeps_the_expectation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(awrs, "TESTS_BEFORE_MASK", 1)
    p, allowed = (0.4, 0.3, 0.2, 0.1), {1, 3}
    mask = np.array([token in allowed for token in range(4)])

    def rule(logp: np.ndarray, ok: Callable[[int], bool], dice: EnumeratedDice) -> Drawn:
        return draw(logp, ok, dice, method="recursive", mask=lambda: mask)

    found = outcomes(p, allowed, rule)
    check_tokens(p, allowed, found)
    assert max(n for *_, n, _ in found) == 2
    nothing = draw(np.zeros(4), lambda _: False, SeededDice(0), mask=lambda: np.zeros(4, bool))
    assert nothing == (NO_TOKEN, -math.inf)
    assert draw(np.log(p), lambda t: t == 3, SeededDice(0), mask=lambda: None)[0] == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-20, 3), min_size=1, max_size=5), st.integers(0, 63))
def test_any_law_and_any_constraint(logp: list[float], bits: int) -> None:
    """E[w 1{x}] = p(x) ok(x) for arbitrary laws, with the recursive rule."""
    allowed = {i for i in range(len(logp)) if bits >> i & 1}
    p = np.exp(logp) / np.exp(logp).sum()
    found = outcomes(tuple(p), allowed, lambda lp, ok, dice: draw(lp, ok, dice, method="recursive"))
    for token, prob in enumerate(p):
        share = sum(w * chance for x, w, _, _, chance in found if x == token)
        assert share == pytest.approx(prob if token in allowed else 0.0, abs=1e-12)


def test_few_tests_in_a_large_vocabulary() -> None:
    """152,000 tokens: the tests do not grow with them, and no draw sorts them."""
    rng, counts = np.random.default_rng(0), []
    logp = rng.normal(size=152_000) * 3
    allowed = rng.random(152_000) < 0.5
    for seed in range(30):
        tested: list[int] = []
        ok = lambda t: bool(tested.append(t)) or bool(allowed[t])  # noqa: B023, E731
        token, _ = draw(logp, ok, SeededDice(seed))
        assert allowed[token]
        counts.append(len(tested))
    assert np.mean(counts) < 10


def test_options_are_checked() -> None:
    for options in (
        {"max_accepts": 1},
        {"max_rejects": 0},
        {"method": "two_run", "max_rejects": 3},
    ):
        with pytest.raises(ConfigError):
            draw(np.zeros(3), bool, SeededDice(0), **options)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="recursive"):
        draw(np.zeros(3), bool, SeededDice(0), method="recursiv")
