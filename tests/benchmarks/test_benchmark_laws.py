"""Laws that benchmarks pass to drafters have everything that STAND reads."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fakes import sequence
from forerun.core.dice import SeededDice
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.drafters.stand import Stand

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module(request.param)


@pytest.mark.parametrize("script", ["stand_misses"], indirect=True)
def test_a_repeated_text_is_accepted_once_it_is_known(script: ModuleType) -> None:
    """Tokens 1 to 4 in turn: no draft for the first four, then whole drafts."""
    text, certain = [1, 2, 3, 4] * 8, np.eye(script.KEPT)[0]
    kept = [np.array([token, *range(10, 9 + script.KEPT)]) for token in text]
    answer = script.Answer(text, kept, [certain] * len(text), [certain] * len(text))
    drafter, sampling = Stand(), Sampling(temperature=0.6)
    seq = sequence([0, 4], len(text), SeededDice(0), sampling)
    counts = script.follow(drafter, seq, answer, Plan(8, 8))
    assert seq.tokens[2:] == text and counts.tokens == len(text)
    assert counts.passes < 12 and counts.causes["no context"] >= 4


@pytest.mark.parametrize("script", ["memory"], indirect=True)
def test_the_memory_benchmark_teaches_its_law(script: ModuleType) -> None:
    p = np.full(50, 0.01, np.float32)
    p[7] = 0.51
    drafter, seq = Stand(), sequence([0, 1], 9, SeededDice(0))
    script.observed_step(drafter, seq, p, np.random.default_rng(0))
    assert drafter.memory(seq).lookup([1, 2, 3, 4]).ids[0] == 7
