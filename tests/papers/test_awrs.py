"""AWRS: few tests a token whatever the vocabulary, and particles that come close to the true law.

The trap grammar of Grammar-Aligned Decoding: one text that a mask makes far too likely.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from three_tokens import three_tokens

from fakes import FakeTarget
from forerun.api import Model, Result
from forerun.constraints.awrs import draw
from forerun.constraints.choice import Choice
from forerun.core.dice import SeededDice
from forerun.search.particles import Particles

pytestmark = pytest.mark.paper
LENGTH, PROMPT = 5, [0, 1]
# aaaaa, and b with any four letters: fair letters make all 17 texts equally likely
TEXTS = ("a" * LENGTH, *("b" + "".join(w) for w in itertools.product("ab", repeat=LENGTH - 1)))
TRUE = {text: 1 / len(TEXTS) for text in TEXTS}
MASKED = {text: 0.5 if text[0] == "a" else 1 / 32 for text in TEXTS}


def fair(tokens: list[int]) -> np.ndarray:
    """Fair letters, and a sure end after LENGTH of them."""
    done = len(tokens) - len(PROMPT) >= LENGTH
    return np.array([1e-200, 1e-200, 1.0] if done else [0.5, 0.5, 1e-200])


def model() -> Model:
    return Model(FakeTarget(fair), three_tokens())


def distance(law: dict[str, float]) -> float:
    """KL(true || law)."""
    return sum(p * math.log(p / law[text]) for text, p in TRUE.items())


@cache
def drawn() -> Result:
    """2000 texts, each drawn alone."""
    how: dict[str, Any] = {"constraint": Choice(TEXTS), "constraint_sampling": "awrs"}
    return model().generate([PROMPT], **how, max_new_tokens=LENGTH + 1, n=2000, seed=5)[0]


def from_particles(n: int, runs: int, **options: object) -> tuple[dict[str, float], list[float]]:
    """The law of the drawn text and the estimates of P(allowed), from seeded runs."""
    search, law, found = Particles(n=n, **options), dict.fromkeys(TEXTS, 0.0), list[float]()  # type: ignore[arg-type]
    with search.session(
        model(), PROMPT, constraint=Choice(TEXTS), max_new_tokens=LENGTH + 1, seed=11
    ) as session:
        for k in range(runs):
            posterior = search.posterior(session, k)
            found.append(math.exp(posterior.log_evidence))
            assert all(sample.valid for sample in posterior.samples)
            for text, weight in posterior.law().items():
                law[text] += weight / runs
    return law, found


@pytest.mark.parametrize("size", [800, 32_000, 128_000])
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_tests_do_not_grow_with_the_vocabulary(size: int, share: float) -> None:
    """A law as of a language model: a few likely tokens, a long tail; 2 to 30 tests a token."""
    rng, counts = np.random.default_rng(size), []
    allowed = rng.random(size) < share
    for k in range(60):
        logp = -1.5 * np.log(np.argsort(rng.random(size)) + 1.0)
        tested: list[int] = []
        ok = lambda token: bool(tested.append(token)) or bool(allowed[token])  # noqa: B023, E731
        token, _ = draw(logp, ok, SeededDice(k))
        assert allowed[token]
        counts.append(len(tested))
    print(size, share, np.mean(counts))
    assert 2 <= np.mean(counts) < (10 if share == 0.5 else 30)
    assert size == 800 or np.mean(counts) < size / 1000


def test_a_mask_is_far_from_the_law_and_awrs_alone_has_the_masked_law() -> None:
    samples = drawn().samples
    counts, num = Counter(sample.text for sample in samples), len(samples)
    assert all(sample.valid for sample in samples)
    assert abs(counts["aaaaa"] / num - 0.5) < 3 * math.sqrt(0.25 / num)
    assert distance(MASKED) == pytest.approx(0.469429, abs=1e-6)


def test_weights_correct_the_masked_law() -> None:
    """Texts of AWRS weighted by their own w: estimates of P(allowed) and of the true law."""
    found = drawn()
    weights = np.array([math.exp(sample.constraint.logw) for sample in found.samples])
    error = weights.std() / math.sqrt(len(weights))
    assert abs(weights.mean() - 17 / 32) < 3 * error
    law = dict.fromkeys(TEXTS, 0.0)
    for sample, weight in zip(found.samples, weights, strict=True):
        law[sample.text] += weight / weights.sum()
    print(distance(law))
    assert distance(law) < 0.05 * distance(MASKED)


@pytest.mark.parametrize("n", [5, 20])
def test_particles_halve_the_distance(n: int) -> None:
    law, found = from_particles(n, 100)
    error = np.std(found) / math.sqrt(len(found))
    print(n, distance(law), np.mean(found), error)
    assert distance(law) < (0.5 if n == 5 else 0.1) * distance(MASKED)
    assert abs(np.mean(found) - 17 / 32) < 3 * error


def test_resampling_keeps_more_particles_of_some_weight() -> None:
    """Particles that lose their weight are replaced on the way."""

    def lost(tokens: list[int]) -> np.ndarray:
        """After a first a the allowed letter is unlikely at every place."""
        text = tokens[len(PROMPT) :]
        if len(text) >= LENGTH:
            return np.array([1e-200, 1e-200, 1.0])
        return np.array([0.05, 0.95, 1e-200] if text[:1] == [0] else [0.5, 0.5, 1e-200])

    kept = {}
    for ess in (0.0, 0.5):
        search = Particles(n=10, ess=ess)
        target = Model(FakeTarget(lost), three_tokens())
        with search.session(
            target, PROMPT, constraint=Choice(TEXTS), max_new_tokens=LENGTH + 1, seed=3
        ) as session:
            runs = [search.posterior(session, k) for k in range(60)]
        kept[ess] = np.mean([sum(w > 1e-3 for w in one.weights) for one in runs])
    print(kept)
    assert kept[0.5] > 1.25 * kept[0.0]


def test_the_defaults_are_those_of_the_experiments() -> None:
    search = Particles()
    assert (search.n, search.settings.ess, search.settings.resampling) == (5, 0.5, "stratified")
