"""No verifier may answer from a law that is none: all tokens forbidden, or a NaN logit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes import FakeTarget, TableSource, run_all, sequence, table_law
from forerun import registry
from forerun.constraints._penalties import Adjust
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Rows
from forerun.core.sampling import Sampling
from forerun.drafters.base import Grown
from forerun.engine.engine import Engine
from forerun.errors import ConfigError, LawError
from forerun.growers.gumbel import Gumbel
from forerun.growers.iid import Iid
from forerun.verifiers.judge import read_head
from forerun.verifiers.reflective import Reflective

TARGET, DRAFT = table_law(1), table_law(2)


def nan_after_two(tokens):
    law = TARGET(tokens).copy()
    if len(tokens) >= 4:
        law[1] = np.nan
    return law


class Hidden(FakeTarget):
    """With hidden rows of zeros, as wide as the shipped judge's head."""

    def forward(self, batch):
        found = super().forward(batch)
        width = read_head("reasoner").width
        return [Rows(rows.logits, torch.zeros(len(rows.logits), width)) for rows in found]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verifier", registry.names("verifier"))
def test_a_broken_law_is_an_error(verifier: str, temperature: float) -> None:
    if verifier == "greedy" and temperature:
        return
    rule = registry.make("verifier", verifier)
    if isinstance(rule, Reflective):
        rule.reflection = [0, 1]  # what a tokenizer would have made of its template
    grower = next(g for g in (Gumbel(), Iid()) if g.labels <= rule.judges)
    banned = Sampling(temperature=temperature, banned_tokens=(0, 1, 2))
    cases = {
        "no token is allowed": (ConfigError, TARGET, banned),
        "expected a finite number": (LawError, nan_after_two, Sampling(temperature=temperature)),
    }
    for message, (kind, law, sampling) in cases.items():
        engine = Engine(
            Hidden(law),
            Grown(TableSource(DRAFT), grower),
            rule,
            Fixed(nodes=4),
            shapers=(Adjust(),),
        )
        with pytest.raises(ConfigError, match=message) as found:
            run_all(engine, [sequence([0, 1], 6, SeededDice(1), sampling)])
        assert found.type is kind
