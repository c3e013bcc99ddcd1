"""A session runs the sequences of one prompt on one engine, whole or step by step.

Sequences share prefill, n-gram memory and batch.

Law: a step ends at a delimiter (a stopping time), and the next step continues from the sampled
tokens with fresh randomness. A series of steps is therefore a plain sample of the target; only the
selection by a search changes the distribution.

Memory: if the KV cache is too small for a batch, fewer sequences run at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forerun.core.dice import Dice, SeededDice
from forerun.core.records import Sequence, Step
from forerun.core.sampling import Sampling
from forerun.engine.requests import as_samplings
from forerun.engine.stats import Stats
from forerun.engine.stopping import Stops, Stream
from forerun.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from forerun.api import Model

log = logging.getLogger("forerun")
STEP = "step"  # finish reason: the step is complete


class StepStops(Stops):
    """Stops that also end a sequence after a step: at a delimiter after text that is not blank.

    A sequence may start with generated tokens; stop strings are searched in their text too.
    """

    def __init__(
        self, eos_ids: Many[int], stream: Callable[[], Stream], delimiters: tuple[str, ...]
    ) -> None:
        super().__init__(eos_ids, stream)
        self._new, self._delimiters = stream, delimiters

    def start(self, seq: Sequence) -> None:
        super().start(seq)
        stream = self._new()
        stream.begin(seq.tokens)
        seq.scratch[self, "step"] = StepText(stream)

    def cut(self, seq: Sequence, tokens: list[int]) -> list[int]:
        kept = super().cut(seq, tokens)
        for count, token in enumerate(kept, start=1):
            is_end = self._completes(seq, token)
            if is_end and (count < len(kept) or seq.finish in (None, "length")):
                seq.finish, seq.end = STEP, None
                return kept[:count]
        return kept

    def _completes(self, seq: Sequence, token: int) -> bool:
        step: StepText = seq.scratch[self, "step"]
        step.text += step.stream.push(token)
        body = step.text.lstrip()
        return any(end in body for end in self._delimiters)


@dataclass
class StepText:
    """The text of a sequence since its step began."""

    stream: Stream
    text: str = ""


class Session:
    """Runs sequences of one prompt; `notes` lists deviations from the request.

    delimiters: texts that end a step; none: whole trajectories. dice: makes the randomness of a
    sequence from seed, prompt number and sequence number. options: of `Model.run`.
    """

    def __init__(
        self,
        model: Model,
        prompt: str | Many[int],
        sampling: Sampling | None = None,
        *,
        batch: int = 1,
        delimiters: tuple[str, ...] = (),
        prompt_index: int = 0,
        needs_logprobs: bool = False,
        dice: Callable[..., Dice] = SeededDice,
        **options: Any,
    ) -> None:
        own: Any = [prompt if isinstance(prompt, str) else list(prompt)]
        self.notes: list[str] = []
        asked = options | {"n": 1}
        given = as_samplings(sampling)
        if needs_logprobs and asked.get("logprobs", given[0].logprobs if given else None) is None:
            asked["logprobs"] = 0
        run = model.run(own, given, batch=self._max_batch(model, batch), **asked)
        self.model, self.engine, self.recorder = model, run.engine, run.recorder
        self._forget = run.forget
        self.pattern = run.engine.scheduler.waiting.popleft()  # checked, never started
        self.seed, self.prompt_index, self._dice = run.seed, prompt_index, dice
        tokens = self.pattern.tokens
        self.prompt = prompt if isinstance(prompt, str) else model.tokenizer.decode(tokens)
        if delimiters:
            stops: Any = self.engine.stops
            self.engine.stops = StepStops(stops.eos_ids, stops.stream, delimiters)
            self.engine.listeners.append(self._sync_cells)
        self.stats = Stats()
        self._paused: list[Sequence] = []  # started, waiting for memory
        self._pins: dict[int, Sequence] = {}  # id of a token list -> sequence that keeps its cells

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def sequence(self, *key: int, tokens: list[int] | None = None, limit: int = 0) -> Sequence:
        """A trajectory of the prompt; or a continuation of `tokens` by at most `limit` tokens."""
        tokens = list(self.pattern.tokens if tokens is None else tokens)
        generated = len(tokens) - self.pattern.num_prompt
        most = min(self.pattern.limit, generated + limit) if limit else self.pattern.limit
        return replace(
            self.pattern,
            tokens=tokens,
            limit=most,
            dice=self.dice(*key),
            index=key[-1],
            logprobs=[],
            allowed_mass=[],
        )

    def dice(self, *key: int) -> Dice:
        """The randomness of a key."""
        return self._dice(self.seed, self.prompt_index, *key)

    def run(self, seqs: Iterable[Sequence]) -> Iterator[Sequence]:
        """Runs sequences to their ends; yields each as it ends."""
        for seq in seqs:
            self.engine.submit(seq)
        while not self.engine.scheduler.is_idle or self._paused:
            yield from self.step()

    def step(self) -> list[Sequence]:
        """One step for every running sequence; returns those that ended."""
        return self._counted(self._step())

    def retire(self) -> list[Sequence]:
        """Removes the cancelled sequences and returns them."""
        with self.engine.target.lock:
            return self._counted(self.engine.retire())

    def _counted(self, ended: list[Sequence]) -> list[Sequence]:
        """Adds the statistics of sequences that have ended."""
        for seq in ended:
            stats = self.recorder.of(seq)
            stats.failures = self.engine.drafter.failures(seq)  # type: ignore[attr-defined]
            self.stats.add(stats)
        return ended

    def cancel_all(self) -> None:
        """Cancels all running and waiting sequences."""
        scheduler = self.engine.scheduler
        for seq in [*scheduler.running, *scheduler.waiting]:
            self.engine.cancel(seq)
        for seq in self._paused:
            self.engine.cancel(seq)
            scheduler.waiting.append(seq)
        self._paused = []

    def close(self) -> None:
        """Frees the KV cells and drops the n-grams of the prompt's trajectories."""
        with self.engine.target.lock:
            self.cancel_all()
            self.engine.retire()
            self.keep([])
            self._forget()

    def text(self, seq: Sequence) -> str:
        """Generated text of a finished sequence, up to a stop string."""
        if seq.finish == STEP or seq.num_generated < self.pattern.limit and seq.finish == "length":
            return self.engine.stops.decode(seq.generated, seq.tokens[: seq.num_prompt])
        return self.engine.stops.text(seq)

    def is_finished(self, seq: Sequence) -> bool:
        """Whether the trajectory has ended, not only its step."""
        return seq.finish == "stop" or seq.num_generated >= self.pattern.limit

    def keep(self, stems: Iterable[list[int]]) -> None:
        """Keeps the cells of these token lists for later sequences, and frees all others."""
        wanted = {id(tokens) for tokens in stems}
        with self.engine.target.lock:
            for key in [key for key in self._pins if key not in wanted]:
                self.engine.target.release(self._pins.pop(key))

    def hold(self, seq: Sequence) -> None:
        """Keeps the cells of a finished sequence, if there is room, until `keep` frees them."""
        cache = getattr(self.engine.target, "cache", None)
        if cache is None or len(self._pins) >= cache.max_slots - self.engine.scheduler.max_seqs:
            return
        holder = replace(seq, logprobs=[])
        with self.engine.target.lock:
            cache.sync(holder)
        self._pins[id(seq.tokens)] = holder

    def note(self, text: str) -> None:
        """Adds a note to the log and to the result."""
        self.notes.append(text)
        log.warning("%s", text)

    def _max_batch(self, model: Model, batch: int) -> int:
        """The batch size, limited by the slots of the target's KV cache."""
        most = getattr(getattr(model.target, "cache", None), "max_slots", batch)
        if batch > most:
            self.note(f"at most {most} sequences run at once, not {batch}: max_seqs is {most}")
        return min(batch, most)

    def _sync_cells(self, step: Step) -> None:
        """Listener: moves the cells of accepted drafts into place when a sequence finishes."""
        cache = getattr(self.engine.target, "cache", None)
        for seq in step.seqs:
            if cache is not None and seq.finish is not None:
                cache.sync(seq)

    def _step(self) -> list[Sequence]:
        with self.engine.target.lock:
            self._resume_paused()
            try:
                return self.engine.step()
            except CapacityError as cause:
                ended = self.engine.retire()
                if not ended:  # otherwise cells have become free
                    self._free_cells(cause)
                return ended

    def _free_cells(self, cause: CapacityError) -> None:
        """Frees kept cells, otherwise pauses half of the sequences; raises if only one runs.

        Law: trees drafted for the failed pass are discarded unseen, so the distribution is kept.
        """
        scheduler = self.engine.scheduler
        if self._pins:
            self.keep([])
            return
        running = scheduler.running
        if len(running) < 2:
            raise cause
        stay = len(running) // 2
        self.note(f"memory is too small for {len(running)} sequences: at most {stay} run ({cause})")
        for seq in running[stay:]:
            self.engine.drafter.finish(seq)
            self.engine.target.release(seq)
        self._paused += running[stay:]
        scheduler.running, scheduler.max_seqs = running[:stay], stay

    def _resume_paused(self) -> None:
        """Resumes paused sequences before new ones start."""
        scheduler = self.engine.scheduler
        while self._paused and len(scheduler.running) < scheduler.max_seqs:
            seq = self._paused.pop(0)
            self.engine.drafter.start(seq)
            scheduler.running.append(seq)


def as_delimiters(given: str | Many[str]) -> tuple[str, ...]:
    """One or several delimiters. Raises ConfigError."""
    found = (given,) if isinstance(given, str) else tuple(given)
    if not found or not all(isinstance(text, str) and text for text in found):
        raise ConfigError(
            f"step_end must be one or more texts that are not empty, got {given!r}; try '\\n'"
        )
    return found
