"""The results of a generation call: samples grouped by prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.engine.generation import Run, Sample
from forerun.engine.stats import Stats


@dataclass(frozen=True)
class Result:
    """All samples of one prompt, and the sum of their statistics."""

    prompt: str | list[int]
    samples: list[Sample]
    seed: int
    stats: Stats = field(default_factory=Stats)

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text


def results_of(run: Run) -> list[Result]:
    """Runs to the end; one Result per prompt.

    An exception has the finished samples in its attribute `samples`.
    """
    samples: list[Sample] = []
    try:
        for sample in run:
            samples.append(sample)
    except BaseException as error:
        error.samples = samples  # type: ignore[attr-defined]
        raise
    groups: list[list[Sample]] = [[] for _ in run.prompts]
    for sample in samples:
        groups[sample.prompt_index].append(sample)
    pairs = zip(run.prompts, groups, strict=True)
    return [_result(prompt, group, run.seed) for prompt, group in pairs]


def _result(prompt: str | list[int], samples: list[Sample], seed: int) -> Result:
    total = Stats()
    ordered = sorted(samples, key=lambda sample: sample.index)
    for sample in ordered:
        total.add(sample.stats)
    return Result(prompt, ordered, seed, total)
