"""Acceptance at one position in closed form, on the sheet's instances."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from forerun.bench.acceptance import (
    by_k_seq,
    given_tuple,
    matched,
    single,
    with_replacement,
    without_replacement,
)
from forerun.core.dice import SeededDice

A = (np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), 2)
B = (np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4]), 2)
C = (*B[:2], 3)
D = (np.array([0.6, 0.2, 0.1, 0.05, 0.05]), np.array([0.35, 0.3, 0.2, 0.1, 0.05]), 2)
CASES = (A, B, C, D)
TABLE = [
    (single, (0.7, 0.6, 0.6, 0.75)),
    (matched, (0.483, 0.35, 0.4646, 0.498875)),
    (with_replacement, (0.76, 0.72, 0.768, 0.8375)),
    (by_k_seq, (0.791355287257, 0.75, 0.793949968308, 0.874159175879)),
]
WITHOUT = (0.82, 0.764285714286, 0.840297619048, 0.863194444444)


@pytest.mark.parametrize(("rule", "values"), TABLE, ids=lambda v: getattr(v, "__name__", ""))
def test_closed_forms(rule, values) -> None:
    assert [rule(*case) for case in CASES] == pytest.approx(values, abs=1e-9)


@pytest.mark.parametrize(("case", "value"), list(zip(CASES, WITHOUT, strict=True)))
def test_without_replacement_over_all_tuples(case, value) -> None:
    p, q, k = case
    total = 0.0
    for tokens in itertools.permutations(range(len(q)), k):
        left, chance = 1.0, 1.0
        for x in tokens:
            chance *= q[x] / left
            left -= q[x]
        total += chance * given_tuple(p, q, list(tokens))
    assert total == pytest.approx(value, abs=1e-9)
    drawn = without_replacement(p, q, k, SeededDice(3), tuples=4000)
    assert drawn == pytest.approx(value, abs=0.02)


def test_tokens_without_mass_are_never_candidates() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.5, 0.5])
    assert by_k_seq(p, q, 3) == pytest.approx(0.5, abs=1e-12)
    assert given_tuple(p, q, [1, 2]) == 1.0 and given_tuple(p, q, [2, 1]) == 0.0
    assert 0 < without_replacement(p, q, 3) < 1  # the mean over both orders
