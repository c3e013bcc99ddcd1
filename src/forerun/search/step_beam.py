"""Beam search over steps: sample continuations, score them, keep the best, go on.

Yao et al., "Tree of Thoughts", 2023; Snell et al., "Scaling LLM Test-Time Compute Optimally", 2024,
with a process reward model as scorer. Not the token-level beam, which ranks by likelihood and
samples nothing. Law: every step is a plain sample after its stem; selection by score is what
departs from the target, as it must.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from forerun.search._steps import Found
from forerun.search._stepwise import StepwiseSearch
from forerun.search.base import divided

if TYPE_CHECKING:
    from forerun.api import Model


class StepBeam(StepwiseSearch):
    """Keeps the n / width best stems and continues each of them `width` times, step by step."""

    @property
    def groups(self) -> int:
        return 1


def step_beam(model: Model, prompt: str | Many[int], **options: Any) -> Found:
    """Searches for one prompt. options: of `StepBeam`, `Model.run` and Sampling.

    batch: how many run at once; all, if it is not given. Raises ConfigError; BranchesLost if the
    scorer lost all.
    """
    own, run = divided(StepBeam, options)
    return StepBeam(**own).run(model, prompt, **run)
