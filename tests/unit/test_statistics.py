"""Ranks, the likelihood-ratio test and Holm's rule."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from forerun.utils import stats as statistics

SKEWED = [(0.9975, 0.0025), (0.9875, 0.0125), (0.6, 0.3875, 0.0125)]


def fit_of(law: np.ndarray, counts: np.ndarray, seed: int = 0) -> tuple[int, float, float]:
    u = statistics.ranks(law, np.repeat(np.arange(len(law)), counts), np.random.default_rng(seed))
    return statistics.fit(u, np.sort(law)[::-1])


def test_likelihood_ratio_agrees_with_scipy() -> None:
    law, counts = np.array([0.4, 0.3, 0.2, 0.1]), np.array([500, 220, 180, 100])
    g, p_value = statistics.likelihood_ratio(counts, law)
    expected = stats.power_divergence(counts, 1000 * law, lambda_="log-likelihood")
    williams = 1 + ((1 / law).sum() - 1) / (6 * 1000 * 3)
    assert g == pytest.approx(expected.statistic / williams)
    assert p_value == pytest.approx(stats.chi2.sf(g, 3))


def test_bins_of_one_law_are_its_tokens_and_rare_ones_are_joined() -> None:
    law = np.array([0.03, 0.5, 0.4, 0.04, 0.03])  # the last three share a bin
    counts = np.array([3, 50, 40, 4, 3])
    assert fit_of(law, counts)[:2] == (2, 0.0)  # of 100
    assert fit_of(law, 10 * counts)[0] == 5 and fit_of(law, 10 * counts)[1] < 1e-9
    assert fit_of(np.array([0.98, 0.02]), np.array([98, 2])) == (1, 0.0, 1.0)


def test_an_excluded_token_is_a_p_value_of_zero() -> None:
    assert fit_of(np.array([0.5, 0.5, 0.0]), np.array([50, 50, 1]))[2] == 0.0


def test_p_values_are_uniform_under_the_law() -> None:
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.ones(20))
    draws = rng.multinomial(2000, law, size=500)
    p_values = [fit_of(law, counts, seed)[2] for seed, counts in enumerate(draws)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_ranks_are_uniform_over_many_laws_and_notice_a_sharper_one() -> None:
    rng = np.random.default_rng(1)
    laws = rng.dirichlet(np.ones(8), size=3000)
    shape = np.sort(laws, axis=1)[:, ::-1].mean(axis=0)

    def p_value(power: float) -> float:
        sharp = laws**power / (laws**power).sum(axis=1, keepdims=True)
        tokens = [rng.choice(8, p=law) for law in sharp]
        u = [statistics.ranks(*pair, rng)[0] for pair in zip(laws, np.c_[tokens], strict=True)]
        return statistics.fit(np.array(u), shape)[2]

    assert p_value(1.0) > 1e-3 and p_value(1.2) < 1e-3


@pytest.mark.parametrize("law", SKEWED)
def test_the_tail_is_right_for_skewed_laws(law: tuple[float, ...]) -> None:
    draws = np.random.default_rng(2).multinomial(2000, law, size=100_000)
    kept, counts = np.unique(draws, axis=0, return_counts=True)
    p_values = [fit_of(np.array(law), draw)[2] for draw in kept]
    for level in (1e-3, 1e-4):
        rate = counts[np.array(p_values) < level].sum() / len(draws)
        assert rate <= 2 * level + 3 * np.sqrt(level / len(draws))


def test_holm_by_hand() -> None:
    assert statistics.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])


def test_noncentral_tail_agrees_with_scipy() -> None:
    for x, degrees, size in ((10.0, 4, 5.0), (30.0, 20, 40.0), (60.0, 1, 30.0), (300.0, 100, 150)):
        expected = stats.ncx2.sf(x, degrees, size)
        assert statistics.noncentral_tail(x, degrees, size) == pytest.approx(expected, rel=1e-6)
    assert statistics.noncentral_tail(9.0, 3, 0.0) == pytest.approx(stats.chi2.sf(9.0, 3))


@pytest.mark.parametrize(("num", "bins", "level"), [(200, 5, 1e-4), (2000, 25, 1e-4)])
def test_what_is_called_detectable_is_found_four_times_of_five(num, bins, level) -> None:
    """The hardest deviation of its size, in proportion to the law, and one that is easier."""
    rng, law = np.random.default_rng(0), np.full(bins, 1 / bins)
    size = statistics.detectable(num, bins, level)
    hard = law * (1 + 2 * size * np.where(np.arange(bins) < bins / 2, 1, -1))
    hard /= hard.sum()
    easy = law.copy()
    easy[0] += size
    easy[1:] -= size / (bins - 1)
    for wrong, least, most in ((hard, 0.7, 0.88), (easy, 0.9, 1.0), (law, 0.0, 0.01)):
        draws = rng.multinomial(num, wrong, size=400)
        found = [statistics.likelihood_ratio(draw, law)[1] < level for draw in draws]
        assert least <= np.mean(found) <= most
    needed = statistics.samples_for(size, bins, level)
    assert needed == pytest.approx(num, abs=2)
