"""One call's sequences on one engine: made as places come free, stepped, and given back as text."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Many
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

FAR = 64  # characters of a text for every token that the context holds
TOGETHER = 16  # trajectories whose dice are made ready at once
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


@dataclass(frozen=True)
class Event:
    """A piece of streamed text; `sample` is set on the last one of a trajectory."""

    prompt_index: int
    index: int
    text: str
    sample: Sample | None = None
    pieces: tuple[Piece, ...] = ()  # the text, cut by how it came


class Run:
    """One call's sequences on one engine.

    samplings: one for each prompt. numbers: those of the prompts in a larger batch, whose
    randomness they then have; unless told 0, 1, 2 ... is_lent: prompts with a seed draft from what
    this run taught alone, as if they were another tenant's, and that is forgotten with the run.
    Iterating over it again goes on while the first iterator lives, and is a ConfigError after one
    that was left before the end. Raises DataError, ConfigError or CapacityError for a prompt that
    cannot be served.
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
        is_lent: bool = False,
    ) -> None:
        self.model, self.engine = model, engine
        self.recorder = recorder
        self.prompts, self.tenant = prompts, tenant
        self.seed = next((s.seed for s in samplings if s.seed is not None), secrets.randbits(31))
        self._number = next(_numbers)  # no two runs share a group
        self._is_done = self._was_left = False  # all samples came; who iterated over it went away
        self._alone = f"{tenant}\0{self._number}" if is_lent else tenant  # tenant of what is seeded
        pairs = zip(prompts, samplings, strict=True)
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
        """Steps the engine to the end; yields after each step the samples that it finished."""
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
                        begins = self.engine.stops.begins(seq)
                        pieces = tuple(origins.pieces(seq, text, start, begins))
                        yield Event(_prompt(seq), seq.index, text[start:], sample, pieces)
                    if sample:
                        del sent[seq]

    def _steps(self) -> Generator[tuple[list[Sequence], list[Sequence]], None, None]:
        """Those that ran before each step, and those that ended with it."""
        if self._was_left:
            raise ConfigError("This run was closed before it finished; call model.run() again.")
        scheduler, ended = self.engine.scheduler, list[Sequence]()
        try:
            while (scheduler.running and not ended) or self._queue():  # an end makes room
                running = list(scheduler.running)
                ended = self.engine.step()
                yield running, ended
            self._is_done = True
        finally:  # also when the caller stops early, or a finalizer does for it
            self._left, self._was_left = iter(()), not self._is_done
            self.model.target.turns.run_when_free(self._abandon)

    def _abandon(self) -> None:
        """Nothing may stay in the drafter or the cache. May be interrupted, and done again."""
        scheduler = self.engine.scheduler
        for seq in [*scheduler.running, *scheduler.waiting]:
            self.engine.cancel(seq)
        self.engine.retire()
        self.forget()

    def forget(self) -> None:
        """The drafter loses what it learned of these prompts only."""
        for i in range(len(self.prompts)):
            forget(self.engine.drafter, (self._number, i))
        if self._alone != self.tenant:
            forget(self.engine.drafter, kept_key("tenant", self._alone))

    def fit(self, warns: bool) -> None:
        """Lets fewer sequences run at once where target or drafter has no room for as many."""
        scheduler, target = self.engine.scheduler, self.model.target
        asked = most = min(scheduler.max_seqs, len(scheduler.waiting))
        why: CapacityError | None = None
        while most > 1:
            try:
                taken = target.check_room(target.num_held + most, self._longest)
                priced(self.engine.drafter).check_room(most, self._longest, taken)
                break
            except CapacityError as found:
                most, why = most - 1, why or found
        if why:
            scheduler.max_seqs = most
            if warns:
                log.warning(f"{most} of {asked} sequences run at once, the others wait: {why}")

    def _queue(self) -> bool:
        """As many wait as may run, and no more are made: n may be huge. Is anything left to do?"""
        scheduler = self.engine.scheduler
        while len(scheduler.waiting) < scheduler.max_seqs:
            seq = next(self._left, None)
            if seq is None:
                break
            self.engine.submit(seq)
        return bool(scheduler.running or scheduler.waiting)

    def _first(self, i: int, prompt: str | list[int], sampling: Sampling) -> Sequence:
        """The first trajectory of a prompt that can be served."""
        context = self.model.target.context
        if isinstance(prompt, str) and len(prompt) > FAR * context:  # it takes long to tokenise
            self._check_length(i, self.model.sizes.least(prompt), "at least ")
        tokens = self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens or prompt == "":
            raise DataError(f"prompt {i} is empty; give it at least one token")
        vocab = self.model.target.vocab_size
        for name in ("logit_bias", "banned_tokens", "stop_token_ids"):
            if (most := max(getattr(sampling, name), default=0)) >= vocab:
                raise ConfigError(
                    f"{name} names token {most}, but the ids of this model end at {vocab - 1}"
                )
        for at, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise DataError(
                    f"prompt {i} has token {token} at position {at}; ids of this model are 0 to "
                    f"{vocab - 1}, so it may be of another tokenizer"
                )
        self._check_length(i, len(tokens))
        seq = Sequence(
            tokens,
            len(tokens),
            sampling,
            SeededDice(self.seed if sampling.seed is None else sampling.seed),
            limit=min(sampling.max_new_tokens, context - len(tokens)),
            group=(self._number, i),
            tenant=self.tenant if sampling.seed is None else self._alone,
        )
        self.engine.verifier.check(sampling)
        return seq

    def _check_length(self, i: int, num_tokens: int, about: str = "") -> None:
        context = self.model.target.context
        if num_tokens >= context:
            raise CapacityError(
                f"prompt {i} has {about}{num_tokens} tokens, but the context of this model is "
                f"{context}; keep {context - 1} or fewer"
            )

    def _sequences(self, firsts: list[Sequence], numbers: Many[int]) -> Iterator[Sequence]:
        """Every trajectory, prompt by prompt, with randomness of its own."""
        for number, first in zip(numbers, firsts, strict=True):
            seed = self.seed if first.sampling.seed is None else first.sampling.seed
            for k, dice in enumerate(_dice(seed, number, first.sampling)):
                yield Sequence(
                    first.tokens.copy(),
                    first.num_prompt,
                    first.sampling,
                    dice,
                    first.limit,
                    first.group,
                    k,
                    first.tenant,
                )

    def _sample(self, seq: Sequence, text: str) -> Sample:
        tokens = seq.generated
        logprobs = None if seq.sampling.logprobs is None else seq.logprobs[: len(tokens)]
        stats = self.recorder.of(seq)
        stats.failures = self.engine.drafter.failures(seq)  # type: ignore[attr-defined]
        return Sample(_prompt(seq), seq.index, text, tokens, seq.finish or "", stats, logprobs)


def _dice(seed: int, number: int, sampling: Sampling) -> Iterator[SeededDice]:
    """The randomness of every trajectory of a prompt; some are made ready at once."""
    for start in range(0, sampling.n, TOGETHER):
        several = range(start, min(start + TOGETHER, sampling.n))
        found = [SeededDice(seed, number, k) for k in several]
        if not sampling.is_greedy:
            for dice in found:
                dice.ready()
        yield from found


def _prompt(seq: Sequence) -> int:
    """The number of its prompt in its run."""
    return seq.group[1]  # type: ignore[index]


def record_logprobs(step: Step) -> None:
    """Listener: the target's own log-probabilities of each emitted token and the top m."""
    for i, (seq, law) in enumerate(zip(step.seqs, step.laws, strict=True)):
        if seq.sampling.logprobs is None:
            continue
        for node, token in zip(step.visited(i), step.emitted[i], strict=True):
            logprobs = law.logprobs(node)
            top = top_ids(logprobs, seq.sampling.logprobs)
            seq.logprobs.append({t: float(logprobs[t]) for t in dict.fromkeys([token, *top])})


def top_ids(values: np.ndarray, count: int) -> list[int]:
    """Ids of the `count` largest of values [V], falling; ties: the lowest id."""
    if count == 0:
        return []
    border = np.partition(values, -count)[-count] if count < len(values) else -np.inf
    best = np.flatnonzero(values >= border)
    return best[np.lexsort((best, -values[best]))][:count].tolist()
