"""Samples that say the same take the rows of one of them: also when one of them is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity import prompt, saved

from fakes import sequence
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Sequence, Step
from forerun.core.sampling import Sampling
from forerun.drafters.none import Plain
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.engine.engine import Engine
from forerun.models.hf import WAYS, HFTarget
from forerun.models.load import load_target
from forerun.runner.model_runner import Runner
from forerun.verifiers.recursive import Recursive

NUM = 5
Made = Callable[[], Runner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return saved("llama", folder)


@pytest.fixture(params=["own", *WAYS])
def made(request: pytest.FixtureRequest, model: Any, folder: Path) -> Made:
    """Makes a target with an empty cache."""
    if request.param == "own":
        return lambda: load_target(folder)  # type: ignore[return-value]
    return lambda: HFTarget(model, way=request.param)


def sampled(
    target: Runner, drafter: Any, cancelled: int | None, after: int = 3
) -> tuple[list[Sequence], list[Step]]:
    """Runs NUM samples of a prompt, one of which is cancelled after some steps."""
    steps: list[Step] = []
    engine = Engine(
        target, drafter, Recursive(), Fixed(nodes=3), listeners=[steps.append], max_seqs=NUM
    )
    sampling = Sampling(temperature=0.02)  # they part, but not at once
    start = prompt(6) * 3  # repeats itself, so that there is something to look up
    seqs = [sequence(start, 24, SeededDice(i), sampling, index=i) for i in range(NUM)]
    for seq in seqs:
        engine.submit(seq)
    for _ in range(after):
        engine.step()
    if cancelled is not None:
        engine.cancel(seqs[cancelled])
    engine.run()
    return seqs, steps


@pytest.mark.parametrize("drafter", [Plain, PromptLookup])
def test_who_is_cancelled_changes_no_other_text(made: Made, drafter: type) -> None:
    whole, steps = sampled(made(), drafter(), None)
    leads = steps[3].leads  # in the first step that one of them misses
    assert leads, "they still have something in common"
    lead = next(i for i in range(NUM) if list(leads).count(i) > 1)
    follower = next(i for i in range(NUM) if leads[i] != i)
    assert len({tuple(seq.tokens) for seq in whole}) > 2, "and part later"
    for gone in (lead, follower):
        target = made()
        seqs, _ = sampled(target, drafter(), gone)
        assert seqs[gone].finish == "cancelled"
        assert seqs[gone].tokens == whole[gone].tokens[: len(seqs[gone].tokens)]
        for i in set(range(NUM)) - {gone}:
            assert seqs[i].tokens == whole[i].tokens
        assert target.num_held == 0
