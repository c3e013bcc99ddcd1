"""Diverse verifier tree search: independent trees, each of which keeps its best step and goes on.

Beeching et al., "Scaling Test-Time Compute with Open Models", 2024. Beam search over steps lets the
children of one good stem crowd out all others; here n samples are n / width trees that never
compete, so finished answers stay diverse. Law: every step is a plain sample after its stem.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from forerun.core.sampling import Sampling
from forerun.search._answers import Parse, last_answer
from forerun.search._scorers import AnyScorer
from forerun.search._steps import Found, Options, search

if TYPE_CHECKING:
    from forerun.api import Model


def dvts(
    model: Model,
    prompt: str | Many[int],
    *,
    scorer: AnyScorer,
    n: int = 16,
    width: int = 4,
    step_end: str | Many[str] = "\n",
    step_tokens: int = 128,
    max_steps: int = 40,
    aggregate: str = "last",
    select: str = "weighted",
    parse: Parse = last_answer,
    batch: int | None = None,
    sampling: Sampling | None = None,
    **options: Any,
) -> Found:
    """n / width trees: each step is sampled `width` times, and the best one goes on.

    The options are those of `step_beam`; with width 1 it is best of n, step by step.
    """
    plan = Options(n, width, step_tokens, max_steps, aggregate, select, parse)
    return search(
        "dvts",
        model,
        prompt,
        scorer,
        plan,
        groups=n // width,
        keep=1,
        step_end=step_end,
        batch=batch,
        sampling=sampling,
        **options,
    )
