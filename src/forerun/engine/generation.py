"""One generation call: creates its sequences, steps the engine, returns samples and events."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Many
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.core.dice import SeededDice
from forerun.core.mixins import forget, priced
from forerun.core.records import Sequence, Step
from forerun.core.scopes import kept_key
from forerun.engine.stats import Stats
from forerun.engine.token_sources import Origins, Piece
from forerun.errors import CapacityError, ConfigError, DataError

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.core.sampling import Sampling
    from forerun.engine.engine import Engine
    from forerun.engine.stats import Recorder

MAX_CHARS_PER_TOKEN = 64  # longer prompts are checked by a lower bound before they are tokenised
_numbers = itertools.count()
log = logging.getLogger("forerun")


@dataclass(frozen=True)
class Sample:
    """One finished trajectory."""

    prompt_index: int
    index: int  # trajectory number, from 0
    text: str
    tokens: list[int]
    finish: str  # "stop", "length" or "cancelled"
    stats: Stats
    logprobs: list[dict[int, float]] | None = None  # per token: id -> the target's log-probability
    constraint: Any = None  # `constraints._request.Report` of its constraint
    lossless: bool = True  # whether the verifier keeps the model's distribution

    @property
    def valid(self) -> bool | None:
        """Whether the constraint allows the text; None without one."""
        return None if self.constraint is None else self.constraint.valid


@dataclass(frozen=True)
class Event:
    """A piece of streamed text; `sample` is set on the last one of a trajectory."""

    prompt_index: int
    index: int
    text: str
    sample: Sample | None = None
    pieces: tuple[Piece, ...] = ()  # the text, split by origin


class Run:
    """The sequences of one call on one engine.

    samplings: one per prompt. numbers: indices of the prompts in a larger batch, which select
    their random streams; default 0, 1, 2, ... forget_after_run: seeded prompts draft only from
    state learned in this run, which is dropped with the run.
    A second iterator continues while the first one is open; after an early close it raises
    ConfigError. Raises DataError, ConfigError or CapacityError for a prompt that cannot be served.
    """

    def __init__(
        self,
        model: Model,
        engine: Engine,
        recorder: Recorder,
        prompts: list[str | list[int]],
        samplings: list[Sampling],
        *,
        numbers: Many[int] | None = None,
        tenant: str = "",
        forget_after_run: bool = False,
    ) -> None:
        self.model, self.engine = model, engine
        self.recorder = recorder
        self.prompts, self.samplings, self.tenant = prompts, samplings, tenant
        self.seed = next((s.seed for s in samplings if s.seed is not None), secrets.randbits(31))
        self._number = next(_numbers)  # makes the groups of this run unique
        self._is_done = self._is_closed = False  # all samples are out; closed before that
        self._warned = False  # that the context ended a text
        # tenant of seeded prompts
        self._seeded_tenant = f"{tenant}\0{self._number}" if forget_after_run else tenant
        pairs = zip(prompts, samplings, strict=True)
        self._is_alone = len(prompts) == 1 and numbers is None
        firsts = [self._first(i, *pair) for i, pair in enumerate(pairs)]
        self._longest = max(seq.num_prompt + seq.limit for seq in firsts)
        self._left = self._sequences(firsts, range(len(prompts)) if numbers is None else numbers)
        self._queue()

    def __iter__(self) -> Iterator[Sample]:
        """Steps the engine to the end; yields finished samples."""
        with closing(self._steps()) as steps:
            for _, ended in steps:
                for seq in ended:
                    yield self._sample(seq, self.engine.stops.text(seq))

    def steps(self) -> Generator[list[Sample], None, None]:
        """Steps the engine to the end; yields the finished samples after each step."""
        with closing(self._steps()) as steps:
            for _, ended in steps:
                yield [self._sample(seq, self.engine.stops.text(seq)) for seq in ended]

    def events(self) -> Iterator[Event]:
        """Steps the engine to the end; yields text pieces and finished samples."""
        origins, sent = Origins(), dict[Sequence, int]()
        self.engine.listeners.append(origins)
        with closing(self._steps()) as steps:
            for stepped, ended in steps:
                for seq in dict.fromkeys([*stepped, *self.engine.scheduler.running, *ended]):
                    text = self.engine.stops.text(seq)
                    start, sent[seq] = sent.get(seq, 0), len(text)
                    sample = self._sample(seq, text) if seq in ended else None
                    if len(text) > start or sample:
                        starts = self.engine.stops.token_starts(seq)
                        pieces = tuple(origins.pieces(seq, text, start, starts))
                        yield Event(_prompt(seq), seq.index, text[start:], sample, pieces)
                    if sample:
                        del sent[seq]

    def _steps(self) -> Generator[tuple[list[Sequence], list[Sequence]], None, None]:
        """Yields the sequences that ran before each step, and those that ended with it."""
        if self._is_closed:
            raise ConfigError("This run was closed before it finished; call model.run() again.")
        scheduler, ended = self.engine.scheduler, list[Sequence]()
        try:
            while (scheduler.running and not ended) or self._queue():
                running = list(scheduler.running)
                ended = self.engine.step()
                self._warn_of_context(ended)
                yield running, ended
            self._is_done = True
        finally:  # also if the caller stops early or the generator is garbage-collected
            self._left, self._is_closed = iter(()), not self._is_done
            self.model.target.lock.run_when_free(self._abandon)

    def _warn_of_context(self, ended: Many[Sequence]) -> None:
        """Warns once if the context, not max_new_tokens, ended a text."""
        cut = [s for s in ended if s.finish == "length" and s.limit < s.sampling.max_new_tokens]
        if cut and not self._warned:
            self._warned = True
            log.warning(
                f"a text ended after {cut[0].limit} of {cut[0].sampling.max_new_tokens} tokens: "
                f"the context of this model is {self.model.target.context} tokens with the prompt"
            )

    def _abandon(self) -> None:
        """Cancels all sequences and drops their state. May be interrupted and run again."""
        scheduler = self.engine.scheduler
        for seq in [*scheduler.running, *scheduler.waiting]:
            self.engine.cancel(seq)
        self.engine.retire()
        self.forget()

    def forget(self) -> None:
        """Drops the drafter's state of these prompts."""
        for i in range(len(self.prompts)):
            forget(self.engine.drafter, (self._number, i))
        if self._seeded_tenant != self.tenant:
            forget(self.engine.drafter, kept_key("tenant", self._seeded_tenant))

    def fit(self, warns: bool) -> None:
        """Lowers the number of concurrent sequences to what target and drafter have memory for."""
        scheduler, target = self.engine.scheduler, self.model.target
        requested = num = min(scheduler.max_seqs, len(scheduler.waiting))
        reason: CapacityError | None = None
        while num > 1:
            try:
                taken = target.check_room(target.num_held + num, self._longest)
                priced(self.engine.drafter).check_room(num, self._longest, taken)
                break
            except CapacityError as found:
                num, reason = num - 1, reason or found
        if reason:
            scheduler.max_seqs = num
            if warns:
                log.warning(
                    f"{num} of {requested} sequences run at once, the others wait: {reason}"
                )

    def _queue(self) -> bool:
        """Submits sequences up to max_seqs, since n may be huge. Returns whether any are left."""
        scheduler = self.engine.scheduler
        while len(scheduler.waiting) < scheduler.max_seqs:
            seq = next(self._left, None)
            if seq is None:
                break
            self.engine.submit(seq)
        return bool(scheduler.running or scheduler.waiting)

    def _first(self, i: int, prompt: str | list[int], sampling: Sampling) -> Sequence:
        """The first trajectory of a prompt. Raises if the prompt cannot be served."""
        context = self.model.target.context
        if isinstance(prompt, str) and len(prompt) > MAX_CHARS_PER_TOKEN * context:
            self._check_length(i, self.model.token_bounds.min_tokens(prompt), "at least ")
        tokens = self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens or prompt == "":
            raise DataError(f"{self._called(i)} is empty; give it at least one token")
        vocab = self.model.target.vocab_size
        for name in ("logit_bias", "banned_tokens", "stop_token_ids"):
            if (largest := max(getattr(sampling, name), default=0)) >= vocab:
                raise ConfigError(
                    f"{name} names token {largest}, but the ids of this model end at {vocab - 1}"
                )
        for at, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise DataError(
                    f"{self._called(i)} has token {token} at position {at}; ids of this model "
                    f"are 0 to {vocab - 1}; use the model's own tokenizer"
                )
        self._check_length(i, len(tokens))
        seq = Sequence(
            tokens,
            len(tokens),
            sampling,
            SeededDice(self.seed if sampling.seed is None else sampling.seed),
            limit=min(sampling.max_new_tokens, context - len(tokens)),
            group=(self._number, i),
            tenant=self.tenant if sampling.seed is None else self._seeded_tenant,
            cache_tenant=self.tenant,
        )
        self.engine.verifier.check(sampling)
        return seq

    def _called(self, i: int) -> str:
        """What errors call a prompt: its number tells nothing if it is the only one."""
        return "the prompt" if self._is_alone else f"prompt {i}"

    def _check_length(self, i: int, num_tokens: int, about: str = "") -> None:
        context = self.model.target.context
        if num_tokens >= context:
            raise CapacityError(
                f"{self._called(i)} has {about}{num_tokens} tokens, but the context of this model "
                f"is {context}; keep {context - 1} or fewer"
            )

    def _sequences(self, firsts: list[Sequence], numbers: Many[int]) -> Iterator[Sequence]:
        """Every trajectory, prompt by prompt, each with its own random stream."""
        for number, first in zip(numbers, firsts, strict=True):
            seed = self.seed if first.sampling.seed is None else first.sampling.seed
            for k in range(first.sampling.n):
                yield Sequence(
                    first.tokens.copy(),
                    first.num_prompt,
                    first.sampling,
                    SeededDice(seed, number, k),
                    first.limit,
                    first.group,
                    k,
                    first.tenant,
                    first.cache_tenant,
                )

    def _sample(self, seq: Sequence, text: str) -> Sample:
        stats = self.recorder.of(seq)
        stats.failures = self.engine.drafter.failures(seq)  # type: ignore[attr-defined]
        reports = (shaper.report(seq, text) for shaper in seq.shapers)
        report = next((found for found in reports if found is not None), None)
        return sample_of(seq, self.engine, stats, _prompt(seq), text, report)


def sample_of(
    seq: Sequence, engine: Engine, stats: Stats, number: int, text: str, report: Any = None
) -> Sample:
    """A sequence at its end as a sample. number: of its prompt. report: of its constraint."""
    tokens, finish = seq.generated, seq.finish or "cancelled"
    logprobs = None if seq.sampling.logprobs is None else seq.logprobs[: len(tokens)]
    exact = engine.verifier.lossless
    return Sample(number, seq.index, text, tokens, finish, stats, logprobs, report, exact)


def _prompt(seq: Sequence) -> int:
    """The index of a sequence's prompt in its run."""
    return seq.group[1]  # type: ignore[index]


def record_logprobs(step: Step) -> None:
    """Listener: stores the target's log-probabilities of each emitted token and the top m."""
    for i, (seq, law) in enumerate(zip(step.seqs, step.laws, strict=True)):
        if seq.sampling.logprobs is None:
            continue
        for node, token in zip(step.visited(i), step.emitted[i], strict=True):
            logprobs = law.logprobs(node)
            top = top_ids(logprobs, seq.sampling.logprobs)
            seq.logprobs.append({t: float(logprobs[t]) for t in dict.fromkeys([token, *top])})


def top_ids(values: np.ndarray, count: int) -> list[int]:
    """Ids of the `count` largest of values [V], descending; ties: the lowest id."""
    if count == 0:
        return []
    border = np.partition(values, -count)[-count] if count < len(values) else -np.inf
    best = np.flatnonzero(values >= border)
    return best[np.lexsort((best, -values[best]))][:count].tolist()
