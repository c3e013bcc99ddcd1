"""Beam search over steps: sample continuations, score them, keep the best, go on.

Yao et al., "Tree of Thoughts", 2023; Snell et al., "Scaling LLM Test-Time Compute Optimally", 2024,
with a process reward model as scorer. Not the token-level beam, which ranks by likelihood and
samples nothing. Law: every step is a plain sample after its stem; selection by score is what
departs from the target, as it must.
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


def step_beam(
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
    """Keeps the n / width best stems and continues each of them `width` times, step by step.

    scorer: a callable on (prompt, text so far), or a Scorer. step_end: text or texts that end a
    step, which else ends after step_tokens. aggregate: of a branch's step scores: last, min, mean,
    product. select: among finished branches by "weighted" votes, "majority", or "score". batch: how
    many run at once (all). options: of `Model.run` and Sampling. Raises ConfigError; BranchesLost.
    """
    plan = Options(n, width, step_tokens, max_steps, aggregate, select, parse)
    return search(
        "step_beam",
        model,
        prompt,
        scorer,
        plan,
        groups=1,
        keep=n // width,
        step_end=step_end,
        batch=batch,
        sampling=sampling,
        **options,
    )
