"""The run of a generation call with `constraint_sampling="smc"`: particles for each sample."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forerun.core.sampling import Sampling
from forerun.engine.generation import Event, Run, Sample

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.search.particles import Particles

FOR_PLAIN_RUNS = ("drafter", "controller", "batch")  # options that particles do not use


class ParticleRun(Run):
    """Yields one text per requested sample, each drawn from particles of its own.

    Prompts with another `constraint_sampling` are sampled by an ordinary run. options: of
    `Model.run`. Text is not streamed: it is known once the particles have ended.
    """

    def __init__(
        self,
        model: Model,
        prompts: list[str | list[int]],
        samplings: list[Sampling],
        search: Particles,
        options: Mapping[str, Any],
    ) -> None:
        self.model, self.prompts, self.search, self.options = model, prompts, search, options
        self.seed = next((s.seed for s in samplings if s.seed is not None), secrets.randbits(31))
        self.samplings = [
            replace(s, seed=self.seed if s.seed is None else s.seed) for s in samplings
        ]
        self.numbers = options.get("numbers") or range(len(prompts))
        particles = [self._is_smc(i) for i in range(len(prompts))]
        self._samples = self._all([i for i, one in enumerate(particles) if not one])

    def __iter__(self) -> Iterator[Sample]:
        return self._samples

    def steps(self) -> Generator[list[Sample], None, None]:
        with closing(self._samples) as samples:
            for sample in samples:
                yield [sample]

    def events(self) -> Iterator[Event]:
        with closing(self._samples) as samples:
            for sample in samples:
                yield Event(sample.prompt_index, sample.index, sample.text, sample)

    def forget(self) -> None:
        """Particles keep nothing."""

    def _is_smc(self, i: int) -> bool:
        return self.samplings[i].constraint_sampling == "smc"

    def _all(self, plain: Many[int]) -> Generator[Sample, None, None]:
        """The samples of ordinary prompts, then those from particles."""
        if plain:
            yield from self._plain(plain)
        for i, prompt in enumerate(self.prompts):
            if i in plain:
                continue
            sampling, number = self.samplings[i], self.numbers[i]
            how = {k: v for k, v in self.options.items() if k not in FOR_PLAIN_RUNS}
            how.pop("numbers", None)
            with self.search.session(
                self.model, prompt, sampling=replace(sampling, n=1), prompt_index=number, **how
            ) as session:
                for sample in self.search.samples(session, sampling.n):
                    yield replace(sample, prompt_index=i)

    def _plain(self, chosen: Many[int]) -> Generator[Sample, None, None]:
        how = {**self.options, "numbers": [self.numbers[i] for i in chosen]}
        prompts: Any = [self.prompts[i] for i in chosen]
        run = self.model.run(prompts, [self.samplings[i] for i in chosen], **how)
        for sample in run:
            yield replace(sample, prompt_index=chosen[sample.prompt_index])
