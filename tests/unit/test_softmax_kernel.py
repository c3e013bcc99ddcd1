"""The softmax inside compiled code against float64."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.verifiers._softmax import softmax_into


def kernel(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray | None:
    out, bits = np.empty_like(logits), np.empty(len(logits), np.int32)
    return out if softmax_into(logits, 1.0 / temperature, out, bits) else None


@pytest.mark.parametrize("vocab", [1, 3, 17, 768, 5003])
@pytest.mark.parametrize("temperature", [0.1, 0.6, 1.0, 2.0])
def test_it_is_the_softmax_to_rounding(vocab: int, temperature: float) -> None:
    logits = (8 * np.random.default_rng(vocab).normal(size=vocab)).astype(np.float32)
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    exact = np.exp(scaled) / np.exp(scaled).sum()
    found = kernel(logits, temperature)
    assert found is not None and abs(found.sum(dtype=np.float64) - 1) < 1e-5
    # the argument of exp is rounded to float32, as in NumPy's own
    np.testing.assert_allclose(found, exact, rtol=2e-6 * (1 + np.abs(scaled).max()), atol=1e-37)


def test_forbidden_tokens_and_those_below_any_float_have_no_probability() -> None:
    found = kernel(np.array([0.0, -np.inf, -1e30, -200.0, -80.0], np.float32))
    assert found is not None and found[[1, 2, 3]].tolist() == [0, 0, 0] and 0 < found[4] < 1e-34


@pytest.mark.parametrize("temperature", [1e-30, 1e-3])
def test_near_zero_temperature_leaves_the_largest(temperature: float) -> None:
    found = kernel(np.array([1.0, 3.0, 2.0], np.float32), temperature)
    assert found is not None and found.tolist() == [0, 1, 0]


def test_negative_logits_are_ordered_as_they_are() -> None:
    found = kernel(np.array([-5.0, -1.0, -3.0], np.float32), 0.01)
    assert found is not None and found.tolist() == [0, 1, 0]


@pytest.mark.parametrize("bad", [np.nan, -np.float32(np.nan), np.inf])
@pytest.mark.parametrize("at", [0, 40])
def test_what_is_no_number_is_told(bad: float, at: int) -> None:
    logits = np.zeros(70, np.float32)
    logits[at] = bad
    assert kernel(logits) is None
    assert kernel(np.full(3, -np.inf, np.float32)) is None
