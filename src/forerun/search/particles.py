"""Sequential Monte Carlo under a constraint: weighted particles, resampled as they grow.

"Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling", 2025.
A mask alone bends the model's law, because it ignores how likely a text can be completed. Each
particle is drawn token by token with AWRS (`constraints/awrs.py`) and weighted by the estimated
allowed mass, which corrects that.

Law: the text drawn from the weighted particles tends to the model's law given that the text is
allowed, as n grows; the mean weight is an unbiased estimate of the probability of allowed texts.
Texts end by themselves: at max_new_tokens end and stop tokens are taken with the weight of their
mass. With stop strings all tokens are drawn there, and a text that does not end has weight 0.
Needs: a constraint, a temperature above 0, no top_k, top_p or min_p. Drafts are not used.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from forerun import registry
from forerun.constraints._report import Particle, by_text, finite_or_none
from forerun.constraints.base import Constraint
from forerun.core.roles import Drafter, Shaper, Verifier, name_of
from forerun.core.sampling import PARTICLES, Sampling
from forerun.engine.generation import Sample, sample_of
from forerun.engine.stats import Stats
from forerun.errors import ConfigError, UnknownName
from forerun.search._particle_run import ParticleRun
from forerun.search._population import Critic, Population, Settings
from forerun.search._resampling import RESAMPLING
from forerun.search._session import Session
from forerun.search.base import Search, split_options
from forerun.utils.numbers import finite, whole
from forerun.utils.text import counted
from forerun.verifiers.weighted import Weighted

if TYPE_CHECKING:
    from forerun.api import Model


@dataclass(frozen=True)
class Posterior:
    """The particles of a prompt at their ends, and one text drawn by weight.

    samples: one per particle; `constraint.logw` is its log weight. weights: of the particles, with
    sum 1; all 0 if no particle is allowed. log_evidence: log of the estimated probability that a
    text of the model is allowed.
    """

    prompt: str
    samples: list[Sample]
    weights: list[float]
    log_evidence: float
    chosen: int
    num_resamplings: int
    num_abandoned: int  # tokens of particles that were dropped; included in `stats`
    seed: int
    stats: Stats
    notes: list[str] = field(default_factory=list)

    @property
    def sample(self) -> Sample:
        """The particle drawn by weight, with the log evidence and the statistics of all."""
        drawn = self.samples[self.chosen]
        report = replace(drawn.constraint, logw=self.log_evidence, particles=tuple(self.particles))
        return replace(drawn, constraint=report, stats=self.stats)

    @property
    def particles(self) -> list[Particle]:
        """Texts and weights of all particles."""
        return [
            Particle(s.text, weight, s.constraint.logw, s.constraint.valid)
            for s, weight in zip(self.samples, self.weights, strict=True)
        ]

    @property
    def text(self) -> str:
        return self.samples[self.chosen].text

    @property
    def num_texts(self) -> int:
        return len(self.samples)

    def law(self) -> dict[str, float]:
        """Text -> its weight, largest first; without particles of weight 0."""
        return by_text(self.particles)

    def shown(self) -> str:
        return self.text

    def remarks(self, seconds: float) -> list[str]:
        if self.log_evidence == -math.inf:
            return ["no particle reached an allowed text; more particles or tokens may help"]
        texts = counted(len(self.law()), "text")
        times = counted(self.num_resamplings, "resampling")
        return [
            f"{texts} among {len(self.samples)} particles, {times}; "
            f"log probability of allowed texts: {self.log_evidence:.2f}"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the drawn text, and all particles with their weights."""
        rows = zip(self.samples, self.weights, strict=True)
        return {
            "method": "particles",
            "prompt": self.prompt,
            "text": self.text,
            "valid": self.samples[self.chosen].valid,
            "log_evidence": finite_or_none(self.log_evidence),
            "chosen": self.chosen,
            "resamplings": self.num_resamplings,
            "seed": self.seed,
            "stats": self.stats.to_dict(),
            "abandoned_tokens": self.num_abandoned,
            "notes": self.notes,
            "particles": [_record(*row) for row in rows],
        }


class Particles(Search):
    """Samples a text under a constraint by sequential Monte Carlo.

    n: number of particles. ess: resample if the effective sample size falls below this share of n;
    0: never. resampling: stratified, systematic, multinomial or residual. critic: MODULE:FUNCTION,
    or a callable on the text so far, which gives a factor of its weight; 0 drops the particle.
    """

    spellings = {"n": "--particles"}
    constraint_sampling = PARTICLES

    def __init__(
        self,
        *,
        n: int = 5,
        ess: float = 0.5,
        resampling: str = "stratified",
        critic: Critic | str | None = None,
    ) -> None:
        self.n = whole("n, the number of particles,", n)
        finite("ess", ess, 0, 1)
        if resampling not in RESAMPLING:
            raise UnknownName.of("resampling", resampling, RESAMPLING)
        self.settings = Settings(n, ess, resampling, as_critic(critic))

    def run(
        self,
        model: Model,
        prompt: str | Many[int],
        *,
        batch: int | None = None,
        **options: Any,
    ) -> Posterior:
        """batch: must not be below n, as particles run at once. Raises as `particles` does."""
        if batch is not None and batch < self.n:
            raise ConfigError(
                f"batch={batch} is below n={self.n} particles, which run at once; leave it out"
            )
        with self.session(model, prompt, **options) as session:
            return self.posterior(session)

    def session(
        self,
        model: Model,
        prompt: str | Many[int],
        *,
        sampling: Sampling | None = None,
        verifier: str | Verifier = registry.DEFAULT_VERIFIER,
        drafter: str | Drafter = registry.DEFAULT_DRAFTER,
        shapers: Many[Shaper] = (),
        **options: Any,
    ) -> Session:
        """A session for runs on one prompt. Raises ConfigError."""
        own = options.get("constraint") or (sampling is not None and sampling.constraint)
        if not own and not any(isinstance(one, Constraint) for one in shapers):
            raise ConfigError(
                "particles need a constraint, such as --constraint 'regex:pattern=[0-9]+' or "
                "constraint=Regex(...); without one every sample already has the model's law"
            )
        how = options | {
            "verifier": _ending(verifier, model),
            "drafter": "none",
            "shapers": shapers,
            "constraint_sampling": "awrs",
        }
        found = Session(model, prompt, sampling, batch=self.n, **how)
        if found.engine.scheduler.max_seqs < self.n:
            found.close()
            raise ConfigError(
                f"n={self.n} particles exceed the model's max_seqs; load it with max_seqs={self.n}"
            )
        if drafter not in (registry.DEFAULT_DRAFTER, "none"):
            name = drafter if isinstance(drafter, str) else name_of(drafter)
            found.note(f"drafter {name} is not used: particles grow by one token a step")
        return found

    @classmethod
    def requested(cls, sampling: Sampling) -> Particles | None:
        """The search of a request with `constraint_sampling="smc"` or "smc:n=20", else None.

        Raises ConfigError, UnknownName for its options.
        """
        name, _, options = sampling.constraint_sampling.partition(":")
        return registry.make("search", f"particles:{options}") if name == PARTICLES else None

    @classmethod
    def runs(
        cls,
        model: Model,
        prompts: list[str | list[int]],
        samplings: list[Sampling],
        options: Mapping[str, Any],
    ) -> ParticleRun:
        """The run of a generation call. options: of `Model.run`."""
        searches = [cls.requested(one) for one in samplings]
        return ParticleRun(model, prompts, samplings, searches, options)

    def posterior(self, session: Session, number: int = 0) -> Posterior:
        """One run of particles in a session. number: of the run, which selects its randomness."""
        group = Population(session, self.settings, number)
        group.run()
        stats = group.stats
        samples = [_sample(session, group, i) for i in range(self.n)]
        return Posterior(
            prompt=session.prompt,
            samples=samples,
            weights=group.weights.tolist(),
            log_evidence=group.log_evidence,
            chosen=group.draw(),
            num_resamplings=group.num_resamplings,
            num_abandoned=stats.generated - group.num_kept,
            seed=session.seed,
            stats=stats,
            notes=session.notes,
        )

    def samples(self, session: Session, count: int) -> Iterator[Sample]:
        """`count` texts, each from a run of its own; `constraint.logw` is the log evidence."""
        for number in range(count):
            yield replace(self.posterior(session, number).sample, index=number)


def particles(model: Model, prompt: str | Many[int], **options: Any) -> Posterior:
    """Runs particles on one prompt. options: of `Particles`, `Model.run` and Sampling.

    Raises ConfigError without a constraint, at temperature 0, and with top_k, top_p or min_p.
    """
    own, run = split_options(Particles, options)
    return Particles(**own).run(model, prompt, **run)


def as_critic(given: Critic | str | None) -> Critic | None:
    """A critic from a callable or MODULE:FUNCTION. Raises ConfigError."""
    if isinstance(given, str):
        module, _, name = given.partition(":")
        try:
            given = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"critic {given!r} cannot be imported: {error}; write MODULE:FUNCTION, and set "
                "PYTHONPATH=. for a file in this folder"
            ) from None
    if given is not None and not callable(given):
        raise ConfigError(f"critic must be a callable on the text so far, got {given!r}")
    return given


def _ending(verifier: str | Verifier, model: Model) -> Weighted:
    """The rule that draws by AWRS, and the end token at the last place."""
    rule = verifier
    if isinstance(rule, str):
        rule = registry.make("verifier", rule, tokenizer=model.tokenizer)
    found = copy(rule) if isinstance(rule, Weighted) else Weighted(rule=rule)
    found.must_end = True
    return found


def _sample(session: Session, group: Population, i: int) -> Sample:
    """A particle at its end, with its weight."""
    seq = group.seqs[i]
    report = replace(group.report(seq), logw=seq.logw)
    stats, number = session.recorder.of(seq), session.prompt_index
    made = sample_of(seq, session.engine, stats, number, session.text(seq), report)
    return replace(made, index=i)


def _record(sample: Sample, weight: float) -> dict[str, Any]:
    return {
        "text": sample.text,
        "tokens": sample.tokens,
        "finish": sample.finish,
        "valid": sample.valid,
        "weight": weight,
        "logw": finite_or_none(sample.constraint.logw),
    }
