"""No verifier may answer from a law that is none: all tokens forbidden, or a NaN logit."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import FakeTarget, TableSource, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.dice import SeededDice
from forerun.drafters.base import Grown
from forerun.engine.loop import Engine
from forerun.errors import ConfigError
from forerun.growers.gumbel import Gumbel
from forerun.growers.iid import Iid
from forerun.sampling import Sampling
from forerun.shaping import Adjust

TARGET, DRAFT = table_law(1), table_law(2)


def nan_after_two(tokens):
    law = TARGET(tokens).copy()
    if len(tokens) >= 4:
        law[1] = np.nan
    return law


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verifier", registry.names("verifier"))
def test_a_broken_law_is_an_error(verifier: str, temperature: float) -> None:
    if verifier == "greedy" and temperature:
        return
    rule = registry.make("verifier", verifier)
    grower = next(g for g in (Gumbel(), Iid()) if g.labels <= rule.judges)
    cases = {
        "no token is left": (TARGET, Sampling(temperature=temperature, banned_tokens=(0, 1, 2))),
        "expected a finite number": (nan_after_two, Sampling(temperature=temperature)),
    }
    for message, (law, sampling) in cases.items():
        engine = Engine(
            FakeTarget(law),
            Grown(TableSource(DRAFT), grower),
            rule,
            Fixed(nodes=4),
            shapers=(Adjust(),),
        )
        with pytest.raises(ConfigError, match=message):
            run_all(engine, [sequence([0, 1], 6, SeededDice(1), sampling)])
