"""Beam search over steps: sample continuations, score them, keep the best, repeat.

Yao et al., "Tree of Thoughts", 2023; Snell et al., "Scaling LLM Test-Time Compute Optimally", 2024,
with a process reward model as scorer. Unlike a token-level beam, which ranks by likelihood, it
samples. Law: every step is a plain sample of the target given its prefix; only the selection by
score changes the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from forerun.search._steps import Found
from forerun.search._stepwise import StepwiseSearch
from forerun.search.base import split_options

if TYPE_CHECKING:
    from forerun.api import Model


class StepBeam(StepwiseSearch):
    """Keeps the n / width best branches and samples `width` continuations of each, step by step."""

    @property
    def groups(self) -> int:
        return 1


def step_beam(model: Model, prompt: str | Many[int], **options: Any) -> Found:
    """Runs the beam search on one prompt. options: of `StepBeam`, `Model.run` and Sampling.

    batch: sequences at once; default: all. Raises ConfigError; BranchesLost if the scorer failed on
    all branches.
    """
    own, run = split_options(StepBeam, options)
    return StepBeam(**own).run(model, prompt, **run)
