"""Diverse verifier tree search: independent trees, each of which keeps its best step and goes on.

Beeching et al., "Scaling Test-Time Compute with Open Models", 2024. Beam search over steps lets the
children of one good stem crowd out all others; here n samples are n / width trees that never
compete, so finished answers stay diverse. Law: every step is a plain sample after its stem.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from forerun.search._steps import Found
from forerun.search._stepwise import StepwiseSearch
from forerun.search.base import divided

if TYPE_CHECKING:
    from forerun.api import Model


class Dvts(StepwiseSearch):
    """n / width trees: each step is sampled `width` times, and the best one goes on.

    With width 1 it is best of n, step by step.
    """

    @property
    def groups(self) -> int:
        return self.n // self.plan.width


def dvts(model: Model, prompt: str | Many[int], **options: Any) -> Found:
    """Searches for one prompt. options: of `Dvts`, `Model.run` and Sampling.

    batch: how many run at once; all, if it is not given. Raises ConfigError; BranchesLost if the
    scorer lost all.
    """
    own, run = divided(Dvts, options)
    return Dvts(**own).run(model, prompt, **run)
