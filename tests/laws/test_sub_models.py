"""A draft cut to its first k layers keeps the target's law for every k, by enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from small_llama import DEPTHS, save_llama

from fakes import sequence
from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.drafters.draft_model import DraftModel
from forerun.models.load import load_target
from harness import EXACT, PROMPT, TARGET, distance

REQUESTS = {
    "free": Sampling(),
    "top-k 2": Sampling(top_k=2),
    "greedy": Sampling(temperature=0),
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory):
    folder = save_llama(tmp_path_factory.mktemp("draft"))
    return load_target(folder, dtype="fp32", max_seqs=4, is_draft=True)


def test_every_depth_has_its_own_law(runner) -> None:
    seq, rows = sequence(PROMPT, 3, SeededDice(0)), []
    for layers in DEPTHS:
        source = DraftModel(model=runner, layers=layers).source
        (q,) = source.next([(seq, ())])
        rows.append(q.probs)
    assert all(np.abs(a - b).max() > 1e-3 for i, a in enumerate(rows) for b in rows[:i])


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize(
    ("grower", "verifier"), [("chain", "speculative"), ("gumbel", "recursive")]
)
@pytest.mark.parametrize("layers", DEPTHS)
def test_the_law_is_kept(runner, layers: int, grower: str, verifier: str, request_: str) -> None:
    drafter = DraftModel(model=runner, layers=layers, grower=grower)
    rule, plan = registry.make("verifier", verifier), Plan(nodes=2, depth=2)
    sampling = REQUESTS[request_]
    error = distance(TARGET, lambda: drafter, rule, plan=plan, sampling=sampling)
    assert error <= EXACT
