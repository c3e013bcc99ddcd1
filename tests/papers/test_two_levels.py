"""STAND in a wide scope: what a prompt's own samples taught goes before what others did.

Twelve problems, eight samples of each one after another at T = 0.6, by the embedded reasoner as if
its passes cost what those of a 0.1B model do. Measured when written, tau: a group's memory alone
2.69, a tenant's alone 2.63, both 2.81. With four samples, all at once, on sixteen other problems
and eight nodes it is 1.89, 2.17 and 2.12: a group that has said little knows less than its tenant.
"""

from __future__ import annotations

import pytest

import forerun
from forerun.api import Model
from forerun.core.cost import Cost
from forerun.core.roles import Drafter
from forerun.drafters.stand import Stand
from forerun.engine.stats import Stats
from forerun.tasks import get_task
from forerun.tasks.base import prepare

pytestmark = [pytest.mark.paper, pytest.mark.slow]


ROWS = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33, 49, 65)
SECONDS = (539, 539, 613, 613, 627, 630, 659, 690, 741, 845, 944, 1131)  # in units of 10 us
COST = Cost(ROWS, tuple(s * 1e-5 for s in SECONDS), 0, 6.1e-5, 1.35e-5, 4.2e-5)


class OneLevel(Stand):
    """Drafts from the wide memory alone."""

    def memory(self, seq):
        return super().memory(seq).fallback


def tau(model: Model, drafter: Drafter) -> float:
    """Over all prompts, which come one after another."""
    task, total = get_task("reasoning"), Stats()
    for i in range(40, 52):
        prompt = prepare(task.example(i), model.tokenizer).prompt
        sampling = {"n": 8, "temperature": 0.6, "max_new_tokens": 250, "seed": i}
        (result,) = model.generate([prompt], drafter=drafter, batch=1, **sampling)
        total.add(result.stats)
    return total.tau


def test_two_levels_are_ahead_of_either() -> None:
    model = forerun.load("reasoner", dtype="bf16")
    model.target.cost = COST
    found = {
        "group": tau(model, Stand(scope="group")),
        "tenant, one level": tau(model, OneLevel(scope="tenant")),
        "tenant": tau(model, Stand(scope="tenant")),
    }
    print({name: round(value, 3) for name, value in found.items()})
    assert found["tenant"] > 1.02 * max(found["group"], found["tenant, one level"])
