"""Local methods as contestants, on one model in this process.

A method is named by its drafter, "none" shown as "plain". Options that the drafter does not have go
to the controller and the verifier, as in "stand:entries=5,nodes=32"; "controller=NAME" and
"verifier=NAME" choose others, and "batch=16" decodes 16 samples concurrently.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forerun import registry
from forerun.bench.contestants import CacheDemand, Outcome, warm_up_sampling
from forerun.bench.metrics import PLAIN
from forerun.bench.results import SampleRecord
from forerun.core.sampling import Sampling
from forerun.errors import CapacityError, ConfigError, UnknownName

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.core.records import Step
    from forerun.core.roles import Drafter
    from forerun.engine.generation import Run, Sample
    from forerun.tasks.base import Example

KINDS = ("drafter", "controller", "verifier")
DEFAULTS = {"controller": registry.DEFAULT_CONTROLLER, "verifier": registry.DEFAULT_VERIFIER}


@dataclass(frozen=True)
class Parts:
    """The parts of a method's name, and its batch size."""

    drafter: str
    controller: str = DEFAULTS["controller"]
    verifier: str = DEFAULTS["verifier"]
    batch: int = 1


class LocalMethod:
    """A method of forerun on a loaded model; local methods share the weights, not the drafter.

    Every repetition of a prompt uses a new tenant, so no method is measured with its own earlier
    answers to the prompt.
    """

    restarts = 0
    host = None

    def __init__(self, name: str, model: Callable[[], Model]) -> None:
        self.name, self.model = name, model
        self.parts = parts_of(name)
        self._demand: CacheDemand | None = None
        self.constraint: tuple[str, ...] = ()
        self.has_headroom = False  # whether every prompt is decoded again, to compute the optimum
        self._repetitions: Counter[str] = Counter()  # by prompt

    def versions(self) -> dict[str, str]:
        from forerun import __version__

        return {"forerun": __version__}

    @property
    def is_batched(self) -> bool:
        return self.parts.batch > 1

    def size_for(self, demand: CacheDemand) -> None:
        self._demand = demand

    def memory_needed(self) -> int:
        """Bytes by which the cache will grow; 0 if the run will be refused for lack of memory."""
        target = self.model().target
        if self._demand is None or not hasattr(target, "check_room"):
            return 0
        tokens = min(self._demand.num_tokens, target.context)
        with suppress(CapacityError):
            return target.check_room(self.parts.batch, tokens)
        return 0

    def memory_plan(self) -> dict[str, int]:
        return {}

    def start(self) -> None:
        model = self.model()
        verifier = registry.make("verifier", self.parts.verifier)
        for part in (model.target, verifier):
            part.warm_up()
        self.drafter.bind(model.target)

    @cached_property
    def drafter(self) -> Drafter:
        """Built once, not shared with other methods."""
        model = self.model()
        return registry.make("drafter", self.parts.drafter, **model.offers)

    def warm_up(self, example: Example, sampling: Sampling) -> None:
        few = warm_up_sampling(sampling, self.parts.batch)
        LocalRun(self, example, few, "warm-up").finish()

    def run(self, example: Example, sampling: Sampling) -> Outcome:
        return self.begin(example, sampling).finish()

    def begin(self, example: Example, sampling: Sampling) -> LocalRun:
        """Starts a prompt that is decoded a few steps at a time."""
        tenant = f"repetition {self._repetitions[example.prompt]}"
        self._repetitions[example.prompt] += 1
        return LocalRun(self, example, sampling, tenant)

    def headroom(self, example: Example, sampling: Sampling) -> dict[str, float] | None:
        """Accepted drafts and the optimum, from a separate run, as it takes time."""
        from forerun.bench.theory import Headroom
        from forerun.lossless.greedy import empty_cache

        if not self.has_headroom or self.parts.drafter == "none":
            return None
        empty_cache(self.model())
        head = Headroom()
        for _ in self.start_run(example.prompt, sampling, head, "headroom"):
            pass
        return dataclasses.asdict(head)

    def close(self) -> None:
        """Does nothing: other methods use the model."""

    def start_run(
        self,
        prompt: str,
        sampling: Sampling,
        on_step: Callable[[Step], None] | None,
        tenant: str,
    ) -> Run:
        return self.model().run(
            [prompt],
            sampling,
            tenant=tenant,
            drafter=self.drafter,
            controller=self.parts.controller,
            verifier=self.parts.verifier,
            constraint=self.constraint,
            batch=self.parts.batch,
            on_step=on_step,
        )

    def memory(self) -> dict[str, int]:
        """Bytes of weights, KV cache and drafter."""
        weights = self.model().target.memory_report()
        return weights | self.drafter.memory_report()


class LocalRun:
    """One prompt by one local method, a few steps at a time; only its own time counts."""

    def __init__(self, own: LocalMethod, example: Example, sampling: Sampling, tenant: str) -> None:
        from forerun.lossless.greedy import empty_cache

        empty_cache(own.model())
        self._own, self._example, self._sampling = own, example, sampling
        self._watch = PrefillTimer(own.model().target)
        self._samples: list[Sample] = []
        self._memory: dict[str, int] = {}
        start = time.perf_counter()
        self._steps = own.start_run(example.prompt, sampling, self._watch, tenant).steps()
        self._seconds = time.perf_counter() - start

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return self._watch.tokens

    def advance(self, most: int | None) -> bool:
        """Runs at most so many steps (None: all); returns whether it can continue."""
        start = time.perf_counter()
        ended: list[Sample] | None = None
        for ended in itertools.islice(self._steps, most):
            self._samples += ended
            if ended and len(self._samples) == self._sampling.n:
                pause = time.perf_counter()  # last moment before the drafter frees its memory
                self._memory = self._own.memory()
                start += time.perf_counter() - pause
        self._seconds += time.perf_counter() - start
        return ended is not None

    def finish(self) -> Outcome:
        """Runs all remaining steps."""
        self.advance(None)
        samples = [sample_record(s) for s in sorted(self._samples, key=lambda s: s.index)]
        headroom = self._own.headroom(self._example, self._sampling)
        return Outcome(self._seconds, samples, self._watch.seconds, self._memory, headroom)

    def stop(self) -> None:
        """Abandons the run."""
        self._steps.close()


class PrefillTimer:
    """Listener: seconds of the passes that computed the prompt, and tokens generated so far."""

    def __init__(self, target: Any) -> None:
        self._target, self._rows, self.seconds = target, getattr(target, "num_rows", None), 0.0
        self.tokens = 0

    def __call__(self, step: Step) -> None:
        self.tokens += sum(map(len, step.emitted))
        rows, before = getattr(self._target, "num_rows", None), self._rows
        self._rows = rows
        starts = any(
            seq.num_generated <= len(new) for seq, new in zip(step.seqs, step.emitted, strict=True)
        )
        if rows is None or before is None:
            prompt_rows = any(seq.index == 0 for seq in step.seqs)
        else:
            prompt_rows = rows - before > sum(1 + len(tree) for tree in step.trees)
        if starts and prompt_rows:
            self.seconds += step.times.get("forward", 0.0)


def sample_record(sample: Sample) -> SampleRecord:
    """The record of one finished trajectory."""
    stats = sample.stats
    deepest = max(stats.accepted_at, default=0)
    return SampleRecord(
        tokens=stats.generated,
        passes=stats.passes,
        drafted=stats.drafted,
        accepted=stats.accepted,
        examined=stats.examined,
        per_position=[stats.accepted_at[i] for i in range(1, deepest + 1)],
        seconds={name: round(seconds, 7) for name, seconds in stats.seconds.items()},
        finish=sample.finish,
        text=sample.text,
        cut=stats.cut,
    )


def parts_of(name: str) -> Parts:
    """Parses a method's name. Raises UnknownName for an option, ConfigError for a value."""
    head, given = registry.parse(name)
    batch = given.pop("batch", "1")
    if not batch.isdecimal() or int(batch) < 1:
        raise ConfigError(f"batch of method {name!r} takes a whole number above 0, got {batch!r}")
    drafter = "none" if head == PLAIN else head
    defaults = dict(DEFAULTS)
    if given.keys() & {"nodes", "depth"}:  # a fixed draft size was requested
        defaults["controller"] = "fixed"
    chosen = {"drafter": drafter} | {k: given.pop(k, default) for k, default in defaults.items()}
    known = {kind: registry.options(registry.get(kind, chosen[kind])) for kind in KINDS}
    taken: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for key, value in given.items():
        owner = next((kind for kind in KINDS if key in known[kind]), None)
        if owner is None:
            names = {"batch", *DEFAULTS, *(option for part in known.values() for option in part)}
            raise UnknownName.of(
                f"option of method {name!r}:", key, names, f"`forerun methods {drafter}`"
            )
        taken[owner].append(f"{key}={value}")
    texts = {kind: ":".join(filter(None, (chosen[kind], ",".join(taken[kind])))) for kind in KINDS}
    for kind in KINDS:
        registry.resolve(kind, texts[kind])
    return Parts(**texts, batch=int(batch))
