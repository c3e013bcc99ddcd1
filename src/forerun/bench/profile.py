"""Where a step's time goes: draft, the target's pass by kind of layer, laws, verify, the rest.

Nothing in the engine knows of it. While a profile runs, the callables of the parts are wrapped by
timers, found by the role or class they belong to; each second belongs to the innermost timer. What
the timers cost themselves is measured on empty functions and taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forerun.bench import machine
from forerun.bench.alerts import lost_cores, too_many_threads
from forerun.bench.metrics import TAKEN
from forerun.bench.step_breakdown import (
    COUNTING,
    FORWARD,
    NATIVE,
    PYTHON,
    REST,
    Bare,
    Budget,
    Measured,
    budget,
)
from forerun.bench.timers import Clock, Patches, calibrate, seconds_of, young_garbage
from forerun.core.sampling import Sampling

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.bench.local_runner import Parts
    from forerun.core.records import Step
    from forerun.engine.generation import Run, Sample
    from forerun.models.transformer import Transformer


def profile(
    model: Model,
    prompt: str,
    sampling: Sampling,
    parts: Parts,
    *,
    rounds: int = 3,
) -> Budget:
    """The budget of a step after the prompt: `rounds` runs with timers, each of them also without.

    The prompt is computed before.
    """
    import torch

    start_run = Runs(model, prompt, sampling, parts)
    start_run.plain(rounds)  # computes the prompt, compiles, touches pages
    cost, clock, bare, timed = calibrate(), Clock(_wait_for(model)), Bare(), Measured()
    threads = torch.get_num_threads()
    watch = machine.Watch(threads)
    with young_garbage():
        for number in range(rounds):
            bare.add(start_run.plain(number))
            start_run.timed(number, clock, timed)
    taken = watch.taken() or 0.0
    alone: dict[str, float] = {}
    if NATIVE in clock.seconds:
        from forerun.bench.kernel_profile import seconds_alone

        target: Any = model.target
        alone = seconds_alone(target.model, max(round(timed.rows / max(timed.steps, 1)), 1))
    found = budget(clock, cost, timed, bare, alone)
    unquiet = f"{lost_cores(taken)}: this machine was not quiet" if taken > TAKEN else ""
    told = (*found.notes, unquiet, too_many_threads(threads, machine.num_cores()))
    return replace(found, notes=tuple(filter(None, told)))


class Runs:
    """Runs of one prompt, with and without timers; those of one number say the same."""

    def __init__(self, model: Model, prompt: str, sampling: Sampling, parts: Parts) -> None:
        self.model, self.prompt, self.sampling, self.parts = model, prompt, sampling, parts

    def plain(self, number: int) -> Bare:
        """Timed as a whole, set-up left out."""
        run = self._run(number)
        samples: list[Sample] = []
        seconds = seconds_of(lambda: samples.extend(consume(run)))
        return Bare(seconds, sum(sample.stats.seconds.get("forward", 0.0) for sample in samples))

    def timed(self, number: int, clock: Clock, found: Measured) -> None:
        """All parts are timed and counted; they are put back afterwards."""
        run = self._run(number, found.count)
        with wrapped_engine(run, clock), wrapped_target(self.model.target, clock):
            clock.wrap(PYTHON, consume)(run)

    def _run(self, number: int, on_step: Callable[[Step], None] | None = None) -> Run:
        return self.model.run(
            [self.prompt],
            replace(self.sampling, seed=(self.sampling.seed or 0) + number),
            drafter=self.parts.drafter,
            controller=self.parts.controller,
            verifier=self.parts.verifier,
            batch=self.parts.batch,
            on_step=on_step,
        )


def consume(run: Run) -> list[Sample]:
    """Steps a run to its end."""
    return list(run)


@contextmanager
def wrapped_engine(run: Run, clock: Clock) -> Iterator[None]:
    """Timers around the roles that an engine calls."""
    from forerun.core import logits
    from forerun.engine import engine as loop

    engine = run.engine
    listeners = engine.listeners
    with Patches() as patch:
        patch(engine.drafter, "propose", "draft", clock)
        patch(loop, "observe_pending", "learn", clock)
        patch(engine.controller, "plan", "plan", clock)
        patch(engine.target, "forward", REST, clock)
        patch(engine.target, "collect", REST, clock)
        patch(engine.target, "commit", "commit", clock)
        patch(engine.verifier, "verify", "verify", clock)
        patch(engine.stops, "cut", "tokens and stops", clock)
        for name in ("__init__", "__getitem__", "logits"):
            patch(logits.TargetProbs, name, "logits copy and shaping", clock)
        engine.listeners = [clock.wrap(_label(hear, engine), hear) for hear in listeners]
        try:
            yield
        finally:
            engine.listeners = listeners


def _label(hear: Callable[..., Any], engine: Any) -> str:
    owner = getattr(hear, "__self__", None)
    if isinstance(owner, Measured):
        return COUNTING
    return "learn" if owner is engine.drafter else "statistics"


@contextmanager
def wrapped_target(target: Any, clock: Clock) -> Iterator[None]:
    """Timers around the parts of our own decoder, or the native kernels that run all of them.

    Of models that transformers runs the pass is one line, "forward: rest".
    """
    from forerun.runner.attention import Pass
    from forerun.runner.model_runner import ModelRunner
    from forerun.runner.native import kernels

    with Patches() as patch:
        if isinstance(target, ModelRunner):
            names = part_names(target.model)
            for cls in {type(part) for part in names.values()}:
                patch.calls(cls, {id(p): n for n, p in _by_part(names) if type(p) is cls}, clock)
            patch(Pass, "__call__", FORWARD + "attention", clock)
            patch(Pass, "__init__", FORWARD + "masks and views", clock)
            if library := kernels().library:
                patch(library, "forerun_pass", NATIVE, clock)
        yield


def part_names(model: Transformer) -> dict[tuple[str, int], Any]:
    """The parts of a decoder by (kind of layer, number)."""
    found: dict[tuple[str, int], Any] = {("head", 0): model.head, ("norms", -1): model.norm}
    norms = ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "q_norm", "k_norm")
    for i, layer in enumerate(model.layers):
        found |= {("qkv", i): layer.qkv, ("out", i): layer.out, ("mlp", i): layer.mlp}
        for k, name in enumerate(norms):
            if (norm := getattr(layer, name, None)) is not None:
                found["norms", i * len(norms) + k] = norm
    return found


def _by_part(names: dict[tuple[str, int], Any]) -> Iterator[tuple[str, Any]]:
    for (kind, _), part in names.items():
        yield FORWARD + kind, part


def _wait_for(model: Model) -> Callable[[], None] | None:
    """What waits for a GPU; None on a CPU."""
    device = getattr(getattr(model.target, "model", None), "device", None)
    if getattr(device, "type", "cpu") != "cuda":
        return None
    import torch

    return lambda: torch.cuda.synchronize(device)
