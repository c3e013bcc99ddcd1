"""One prompt's sequences on one engine, whole or step by step: shared prefill, memory and batch.

Law: a step ends where the text says so (a stopping time), and the next one goes on from the very
tokens that were sampled, with its own fresh randomness. Steps in a row are therefore one plain
sample of the target; nothing but what a search selects departs from that law.

Memory: where the key-value cells of a batch do not fit, fewer sequences run at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from forerun.core.dice import Dice, SeededDice
from forerun.core.records import Sequence, Step
from forerun.core.sampling import Sampling
from forerun.engine.stats import Stats
from forerun.engine.stopping import Stops, Stream
from forerun.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from forerun.api import Model

log = logging.getLogger("forerun")
STEP = "step"  # why a sequence ended: its step is complete


class StepStops(Stops):
    """Ends a sequence also where a step ends: a delimiter after text that is not blank.

    A sequence may begin with generated tokens; stop strings are looked for in their text, too.
    """

    def __init__(
        self, eos_ids: Many[int], stream: Callable[[], Stream], delimiters: tuple[str, ...]
    ) -> None:
        super().__init__(eos_ids, stream)
        self._new, self._delimiters = stream, delimiters
        self._steps: WeakKeyDictionary[Sequence, tuple[Stream, list[str]]] = WeakKeyDictionary()

    def start(self, seq: Sequence) -> None:
        super().start(seq)
        self._steps[seq] = self._new(), [""]

    def cut(self, seq: Sequence, tokens: list[int]) -> list[int]:
        kept = super().cut(seq, tokens)
        for count, token in enumerate(kept, start=1):
            is_end = self._completes(seq, token)
            if is_end and (count < len(kept) or seq.finish in (None, "length")):
                seq.finish, seq.end = STEP, None
                return kept[:count]
        return kept

    def _completes(self, seq: Sequence, token: int) -> bool:
        stream, text = self._steps[seq]
        text[0] += stream.push(token)
        body = text[0].lstrip()
        return any(end in body for end in self._delimiters)


class Session:
    """Runs sequences of one prompt; `notes` says what was done differently from what was asked.

    delimiters: texts that end a step; none for whole trajectories. dice: makes a sequence's
    randomness from the seed, the prompt's number and the sequence's own. options: of `Model.run`.
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
        from forerun.api import as_samplings

        own: Any = [prompt if isinstance(prompt, str) else list(prompt)]
        self.notes: list[str] = []
        asked = options | {"n": 1}
        given = as_samplings(sampling)
        if needs_logprobs and asked.get("logprobs", given[0].logprobs if given else None) is None:
            asked["logprobs"] = 0
        run = model.run(own, given, batch=self._seats(model, batch), **asked)
        self.model, self.engine, self.recorder = model, run.engine, run.recorder
        self._forget = run.forget
        self.pattern = run.engine.scheduler.waiting.popleft()  # checked, and never started
        self.seed, self.prompt_index, self._dice = run.seed, prompt_index, dice
        tokens = self.pattern.tokens
        self.prompt = prompt if isinstance(prompt, str) else model.tokenizer.decode(tokens)
        if delimiters:
            stops: Any = self.engine.stops
            self.engine.stops = StepStops(stops.eos_ids, stops._stream, delimiters)
            self.engine.listeners.append(self._settle)
        self.stats = Stats()
        self._held: list[Sequence] = []  # begun, and waiting for memory
        self._pins: dict[int, Sequence] = {}  # id of a token list -> who keeps its cells

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def sequence(self, *key: int, tokens: list[int] | None = None, limit: int = 0) -> Sequence:
        """A trajectory of the prompt, or one that goes on after `tokens` by at most `limit`."""
        tokens = list(self.pattern.tokens if tokens is None else tokens)
        generated = len(tokens) - self.pattern.num_prompt
        most = min(self.pattern.limit, generated + limit) if limit else self.pattern.limit
        dice = self._dice(self.seed, self.prompt_index, *key)
        return replace(
            self.pattern, tokens=tokens, limit=most, dice=dice, index=key[-1], logprobs=[]
        )

    def run(self, seqs: Iterable[Sequence]) -> Iterator[Sequence]:
        """Runs sequences to their ends; yields each as it ends."""
        for seq in seqs:
            self.engine.submit(seq)
        while not self.engine.scheduler.is_idle or self._held:
            for seq in self._step():
                stats = self.recorder.of(seq)
                stats.failures = self.engine.drafter.failures(seq)  # type: ignore[attr-defined]
                self.stats.add(stats)
                yield seq

    def cancel_all(self) -> None:
        """Ends whatever runs or waits."""
        scheduler = self.engine.scheduler
        for seq in [*scheduler.running, *scheduler.waiting]:
            self.engine.cancel(seq)
        for seq in self._held:
            self.engine.cancel(seq)
            scheduler.waiting.append(seq)
        self._held = []

    def close(self) -> None:
        """Frees everything; the n-grams of the prompt's trajectories are forgotten."""
        with self.engine.target.turns:
            self.cancel_all()
            self.engine.retire()
            self.keep([])
            self._forget()

    def text(self, seq: Sequence) -> str:
        """Generated text of an ended sequence, up to a stop string."""
        if seq.finish == STEP or seq.num_generated < self.pattern.limit and seq.finish == "length":
            return self.model.tokenizer.decode(seq.generated)
        return self.engine.stops.text(seq)

    def is_finished(self, seq: Sequence) -> bool:
        """Whether the trajectory has ended, and not just its step."""
        return seq.finish == "stop" or seq.num_generated >= self.pattern.limit

    def keep(self, stems: Iterable[list[int]]) -> None:
        """The cells of these token lists, and of no others, stay for sequences to come."""
        wanted = {id(tokens) for tokens in stems}
        with self.engine.target.turns:
            for key in [key for key in self._pins if key not in wanted]:
                self.engine.target.release(self._pins.pop(key))

    def hold(self, seq: Sequence) -> None:
        """Keeps the cells of an ended sequence until `keep` lets them go, if there is room."""
        cache = getattr(self.engine.target, "cache", None)
        if cache is None or len(self._pins) >= cache.max_slots - self.engine.scheduler.max_seqs:
            return
        holder = replace(seq, logprobs=[])
        with self.engine.target.turns:
            cache.sync(holder)
        self._pins[id(seq.tokens)] = holder

    def note(self, text: str) -> None:
        """A remark for the user: in the log now, and in the result."""
        self.notes.append(text)
        log.warning("%s", text)

    def _seats(self, model: Model, batch: int) -> int:
        """How many may run at once: no more than the target has slots."""
        most = getattr(getattr(model.target, "cache", None), "max_slots", batch)
        if batch > most:
            self.note(f"at most {most} sequences run at once, not {batch}: max_seqs is {most}")
        return min(batch, most)

    def _settle(self, step: Step) -> None:
        """Listener: cells of accepted drafts are put in place before a finished step is left."""
        cache = getattr(self.engine.target, "cache", None)
        for seq in step.seqs:
            if cache is not None and seq.finish is not None:
                cache.sync(seq)

    def _step(self) -> list[Sequence]:
        with self.engine.target.turns:
            self._readmit()
            try:
                return self.engine.step()
            except CapacityError as cause:
                ended = self.engine.retire()
                if not ended:  # else cells have become free
                    self._make_room(cause)
                return ended

    def _make_room(self, cause: CapacityError) -> None:
        """Lets go of kept cells, or else lets half of the sequences wait; raises if one is left.

        Trees that were drawn for the failed pass are thrown away unseen, so no law is touched.
        """
        scheduler = self.engine.scheduler
        if self._pins:
            self.keep([])
            return
        running = scheduler.running
        if len(running) < 2:
            raise cause
        stay = len(running) // 2
        self.note(f"memory holds no {len(running)} sequences: at most {stay} run at once ({cause})")
        for seq in running[stay:]:
            self.engine.drafter.finish(seq)
            self.engine.target.release(seq)
        self._held += running[stay:]
        scheduler.running, scheduler.max_seqs = running[:stay], stay

    def _readmit(self) -> None:
        """Those that were stopped in the middle go on before others begin."""
        scheduler = self.engine.scheduler
        while self._held and len(scheduler.running) < scheduler.max_seqs:
            seq = self._held.pop(0)
            self.engine.drafter.start(seq)
            scheduler.running.append(seq)


def as_delimiters(given: str | Many[str]) -> tuple[str, ...]:
    """One or several delimiters. Raises ConfigError."""
    found = (given,) if isinstance(given, str) else tuple(given)
    if not found or not all(isinstance(text, str) and text for text in found):
        raise ConfigError(
            f"step_end must be a text or several, none of them empty, got {given!r}; try '\\n'"
        )
    return found
