"""Logits become probabilities as a slow reference says, and bad parameters are refused."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forerun.core import truncation
from forerun.core.sampling import Sampling, from_json, log_softmax, softmax, to_probs
from forerun.errors import ConfigError

QUARTERS = st.integers(-12, 12).map(lambda i: i / 4)  # coarse, so that ties are common
TEMPERATURES = st.sampled_from([0.3, 0.5, 1.0, 1.7])


def by_falling_probability(probs: list[float]) -> list[int]:
    """Ids sorted by probability, ties by id."""
    return sorted(range(len(probs)), key=lambda i: -probs[i])  # stable


def only(probs: list[float], kept: set[int]) -> list[float]:
    """The law without the other ids, renormalised."""
    total = math.fsum(probs[i] for i in kept)
    return [p / total if i in kept else 0.0 for i, p in enumerate(probs)]


def reference(logits: np.ndarray, s: Sampling, margin: float = 1e-6) -> list[float]:
    """The same law in plain Python; assumes that no probability lies on the edge of a cut."""
    if s.temperature == 0:
        best = min(i for i, x in enumerate(logits) if x == max(logits))
        return [float(i == best) for i in range(len(logits))]
    top = float(max(logits))
    weights = [math.exp((x - top) / s.temperature) for x in logits.tolist()]
    probs = only(weights, set(range(len(weights))))
    if s.top_k:
        probs = only(probs, set(by_falling_probability(probs)[: s.top_k]))
    if s.top_p < 1:
        kept, mass = set(), 0.0
        for i in by_falling_probability(probs):
            kept.add(i)
            mass += probs[i]
            assume(abs(mass - s.top_p) > margin)
            if mass >= s.top_p:
                break
        probs = only(probs, kept)
    if s.min_p:
        best = max(probs)
        border = s.min_p * best
        assume(all(abs(p - border) > margin * best for p in probs))
        probs = only(probs, {i for i, p in enumerate(probs) if p >= border})
    return probs


PARAMETERS = st.builds(
    Sampling,
    temperature=TEMPERATURES,
    top_k=st.integers(0, 9),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
)


@settings(deadline=None)
@given(st.lists(QUARTERS, min_size=1, max_size=8), PARAMETERS)
def test_small_vocabulary_equals_the_reference(logits, sampling):
    logits = np.array(logits)
    expected = reference(logits, sampling)
    np.testing.assert_allclose(to_probs(logits, sampling), expected, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1.0, 3.0, 6.0]), PARAMETERS)
def test_large_vocabulary_equals_the_reference(seed, scale, sampling):
    logits = np.random.default_rng(seed).normal(size=4 * 512 + 100) * scale
    expected = reference(logits, sampling)
    np.testing.assert_allclose(to_probs(logits, sampling), expected, atol=1e-11)


@settings(deadline=None)
@given(st.lists(QUARTERS, min_size=1, max_size=8))
def test_greedy_takes_the_lowest_id_of_the_best(logits):
    logits = np.array(logits)
    assert to_probs(logits, Sampling(temperature=0)).tolist() == reference(
        logits, Sampling(temperature=0)
    )


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(0.05, 0.95))
def test_fast_path_of_top_p_orders_as_the_full_sort_does(seed, p):
    probs = softmax(np.random.default_rng(seed).normal(size=3000) * 4)
    fast, full = truncation._descending(probs, p), np.argsort(-probs, kind="stable")
    assert np.array_equal(fast, full[: len(fast)])
    assert probs[fast].sum() >= p


def test_fast_path_of_top_p_is_taken_where_it_may_be():
    probs = softmax(np.random.default_rng(0).normal(size=3000) * 4)
    assert len(truncation._descending(probs, 0.5)) < 1000
    assert len(truncation._descending(np.full(3000, 1 / 3000), 0.5)) == 3000


def test_fast_path_of_top_p_grows_before_it_gives_up():
    """A flat law of a large vocabulary: some thousand tokens, not a sort of all."""
    probs = softmax(np.random.default_rng(0).normal(size=100_000).astype(np.float32) * 2.5)
    fast, full = truncation._descending(probs, 0.6), np.argsort(-probs, kind="stable")
    assert len(fast) < 50_000 and np.array_equal(fast, full[: len(fast)])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.floats(0.5, 9), st.integers(1, 3000), st.floats(0.05, 0.99))
def test_truncation_of_large_vocabularies_equals_the_sort_of_all(seed, spread, k, p):
    probs = softmax(np.random.default_rng(seed).normal(size=20_000) * spread)
    order = np.argsort(-probs, kind="stable")
    assert truncation.truncated(probs, k, 1.0, 0.0).tolist() == sorted(order[:k])
    size = int(np.searchsorted(np.cumsum(probs[order]), p - 1e-9)) + 1
    assert truncation.truncated(probs, 0, p, 0.0).tolist() == sorted(order[:size])
    both = truncation.truncated(probs, k, p, 0.0)
    left = np.cumsum(probs[order[:k]]) / probs[order[:k]].sum()
    assert both.tolist() == sorted(order[: int(np.searchsorted(left, p - 1e-9)) + 1])


def test_ties_at_the_border_of_the_fast_path_keep_the_lowest_ids():
    logits = np.zeros(3000)
    logits[2500] = 1.0
    kept = np.flatnonzero(to_probs(logits, Sampling(top_p=0.1)))
    assert kept.tolist() == [*range(len(kept) - 1), 2500]


def test_top_p_reaches_the_mass_exactly_where_it_can():
    assert (to_probs(np.zeros(4), Sampling(top_p=0.5)) > 0).sum() == 2
    assert (to_probs(np.zeros(10), Sampling(top_p=0.3)) > 0).sum() == 3
    assert (to_probs(np.zeros(10), Sampling(top_p=1e-9)) > 0).sum() == 1


def test_ties_at_every_cut_go_to_the_lowest_ids():
    logits = np.array([0.0, 1.0, 1.0, 1.0, 0.0])
    assert np.flatnonzero(to_probs(logits, Sampling(top_k=2))).tolist() == [1, 2]
    assert np.flatnonzero(to_probs(logits, Sampling(top_k=4))).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(to_probs(np.zeros(4), Sampling(top_p=0.5))).tolist() == [0, 1]
    assert np.flatnonzero(to_probs(logits, Sampling(min_p=1.0))).tolist() == [1, 2, 3]


@settings(deadline=None)
@given(st.lists(QUARTERS, min_size=2, max_size=8), PARAMETERS, st.integers(0, 7))
def test_a_banned_token_stays_impossible(logits, sampling, which):
    logits = np.array(logits)
    banned = which % len(logits)
    logits[banned] = -np.inf
    probs = to_probs(logits, sampling)
    assert probs[banned] == 0
    assert probs.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_float_type_is_kept(dtype):
    logits = np.random.default_rng(0).normal(size=50).astype(dtype)
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(top_k=5, top_p=0.9, min_p=0.1)):
        probs = to_probs(logits, sampling)
        assert probs.dtype == dtype
        assert probs.sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-50, 1e-300])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tiny_temperature_tends_to_greedy(temperature, dtype):
    logits = np.array([0.0, 2.0, 1.0], dtype)
    assert to_probs(logits, Sampling(temperature=temperature)).tolist() == [0, 1, 0]


def test_log_softmax_is_the_logarithm_of_softmax():
    logits = np.array([3.0, -1.0, 0.5, -np.inf])
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(log_softmax(logits), np.log(softmax(logits)), atol=1e-12)
    assert log_softmax(logits.astype(np.float32)).dtype == np.float64


def powers(p: list[float], temperature: float) -> np.ndarray:
    return to_probs(np.log(p), Sampling(temperature=temperature))


@pytest.mark.parametrize(
    ("target", "draft", "overlap"),
    [
        (0.5, 0.5, 0.447368),
        (1.0, 1.0, 0.7),
        (2.0, 2.0, 0.847305),
        (0.5, 1.0, 0.542105),
        (2.0, 1.0, 0.762751),
    ],
)
def test_acceptance_of_one_draft_under_a_temperature(target, draft, overlap):
    p, q = powers([0.5, 0.3, 0.2], target), powers([0.2, 0.3, 0.5], draft)
    assert np.minimum(p, q).sum() == pytest.approx(overlap, abs=1e-6)


def test_acceptance_of_one_draft_under_top_k_2():
    p = to_probs(np.log([0.5, 0.3, 0.2]), Sampling(top_k=2))
    q = to_probs(np.log([0.2, 0.3, 0.5]), Sampling(top_k=2))
    np.testing.assert_allclose(p, [0.625, 0.375, 0], atol=1e-12)
    np.testing.assert_allclose(q, [0, 0.375, 0.625], atol=1e-12)
    assert np.minimum(p, q).sum() == pytest.approx(0.375, abs=1e-12)
    assert np.minimum(p, [0.2, 0.3, 0.5]).sum() == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"frequency_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {1: -1e300}},
        {"logit_bias": {"1": 1}},
        {"frequency_penalty": math.nan},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": None},
        {"min_new_tokens": -1},
        {"max_new_tokens": 0},
        {"stop": ("",)},
        {"stop": (3,)},
        {"stop": ("\ud83d",)},  # half a surrogate pair: no text of a model holds it
        {"seed": -1},
        {"n": 0},
        {"logprobs": -1},
    ],
    ids=str,
)
def test_a_value_that_cannot_work_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        Sampling(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": math.inf},
        {"n": True},
        {"temperature": True},
        {"temperature": np.True_},
        {"temperature": 10**400},
        {"top_p": np.True_},
        {"logprobs": np.True_},
        {"logit_bias": {5: True}},
        {"logit_bias": {True: 1.0}},
        {"banned_tokens": (True,)},
        {"ignore_eos": "no"},
        {"ignore_eos": 1},
        {"ignore_eos": None},
        {"seed": 1.5},
        {"logprobs": 2.5},
        {"logprobs": 2.0},
        {"logprobs": np.float64(2)},
        {"banned_tokens": (-1,)},
        {"stop_token_ids": ("a",)},
        {"logit_bias": {-1: 1.0}},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        Sampling(**wrong)


def test_numbers_of_numpy_are_numbers():
    half = np.float32(0.5)
    names = ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
    sampling = Sampling(logprobs=np.int64(3), logit_bias={5: half}, **dict.fromkeys(names, half))
    assert sampling.temperature == sampling.logit_bias[5] == 0.5 and sampling.logprobs == 3
    whole = Sampling(**dict.fromkeys(("seed", "n", "top_k", "max_new_tokens"), np.int64(3)))
    assert whole == Sampling(seed=3, n=3, top_k=3, max_new_tokens=3) and type(whole.seed) is int
    assert type(sampling.temperature) is float and Sampling(ignore_eos=np.True_).ignore_eos is True


def test_ids_of_json_are_plain_digits():
    given = from_json({"n": 2, "logit_bias": {"0": -1.5, "50256": 2}})
    assert given == {"n": 2, "logit_bias": {0: -1.5, 50256: 2}}


@pytest.mark.parametrize(
    "key",
    ["05", " 5", "5_0", "+5", "-5", "5.0", "٣", "", "1" * 12, "9" * 5000, (1,), 5.5],
    ids=lambda key: ascii(key)[:20],
)
def test_an_id_that_is_written_otherwise_is_refused(key):
    said = "logit_bias must map token ids to biases, got the id " + re.escape(repr(key)[:40])
    with pytest.raises(ConfigError, match=f"^{said}; write ids as plain digits"):
        from_json({"logit_bias": {"5": 1, key: 2}})


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="min_new_tokens=9 exceeds max_new_tokens=3"):
        Sampling(min_new_tokens=9, max_new_tokens=3)
    with pytest.raises(ConfigError, match=r"tokens 4 are banned and have a positive"):
        Sampling(banned_tokens=(4,), logit_bias={4: 1.0, 5: 2.0})


def test_a_single_value_stands_for_a_tuple():
    sampling = Sampling(stop="\n", stop_token_ids=3, banned_tokens=0)
    assert (sampling.stop, sampling.stop_token_ids, sampling.banned_tokens) == (("\n",), (3,), (0,))
    assert Sampling(stop=None).stop == ()
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    "changed",
    [
        {"logit_bias": {1: 1.0}},
        {"banned_tokens": (1,)},
        {"min_new_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
    ],
    ids=str,
)
def test_adjusts_says_whether_logits_change_before_the_temperature(changed):
    assert Sampling(**changed).adjusts
    assert not Sampling(temperature=0.5, top_k=3, stop="x").adjusts
