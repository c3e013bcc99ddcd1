"""Diverse verifier tree search: independent trees, each keeps its best step.

Beeching et al., "Scaling Test-Time Compute with Open Models", 2024. In beam search the children of
one good branch replace all others. Here n samples form n / width trees that do not compete, so
finished answers stay diverse. Law: every step is a plain sample of the target given its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from forerun.search._steps import Found
from forerun.search._stepwise import StepwiseSearch
from forerun.search.base import split_options

if TYPE_CHECKING:
    from forerun.api import Model


class Dvts(StepwiseSearch):
    """n / width trees: each step is sampled `width` times, and the best one is kept.

    With width 1 this is best of n.
    """

    @property
    def groups(self) -> int:
        return self.n // self.plan.width


def dvts(model: Model, prompt: str | Many[int], **options: Any) -> Found:
    """Runs DVTS on one prompt. options: of `Dvts`, `Model.run` and Sampling.

    batch: sequences at once; default: all. Raises ConfigError; BranchesLost if the scorer failed on
    all branches.
    """
    own, run = split_options(Dvts, options)
    return Dvts(**own).run(model, prompt, **run)
