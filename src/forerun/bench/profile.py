"""Profile of a decoding step: draft, the target's pass by kind of layer, logits, verify, the rest.

The callables of the engine's parts are wrapped by timers while a profile runs; each second belongs
to the innermost timer. The timers' own cost is measured on empty functions and subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forerun.bench import cpu_load
from forerun.bench.alerts import lost_cores_text
from forerun.bench.disturbance import MAX_EXTRA_LOSS
from forerun.bench.step_breakdown import (
    COUNTING,
    FORWARD,
    NATIVE,
    PYTHON,
    REST,
    StepBreakdown,
    TimedRuns,
    UntimedRuns,
    breakdown,
)
from forerun.bench.timers import Clock, Patches, calibrate, freeze_old_objects, seconds_of
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
) -> StepBreakdown:
    """The time of a step after the prefill, from `rounds` runs with and without timers."""
    import torch

    start_run = Runs(model, prompt, sampling, parts)
    start_run.plain(rounds)  # prefill, compilation, page faults
    cost, clock, bare, timed = calibrate(), Clock(_wait_for(model)), UntimedRuns(), TimedRuns()
    threads = torch.get_num_threads()
    meter = cpu_load.CoreLossMeter(threads)
    with freeze_old_objects():
        for number in range(rounds):
            bare.add(start_run.plain(number))
            start_run.timed(number, clock, timed)
    lost = meter.lost() or 0.0
    alone: dict[str, float] = {}
    if NATIVE in clock.seconds:
        from forerun.bench.kernel_profile import seconds_alone

        target: Any = model.target
        alone = seconds_alone(target.model, max(round(timed.rows / max(timed.steps, 1)), 1))
    found = breakdown(clock, cost, timed, bare, alone)
    if lost > MAX_EXTRA_LOSS:
        found = replace(found, notes=(*found.notes, f"busy machine: {lost_cores_text(lost)}"))
    return found


class Runs:
    """Runs of one prompt, with and without timers; equal numbers give equal texts."""

    def __init__(self, model: Model, prompt: str, sampling: Sampling, parts: Parts) -> None:
        self.model, self.prompt, self.sampling, self.parts = model, prompt, sampling, parts

    def plain(self, number: int) -> UntimedRuns:
        """A run without timers, timed as a whole after its set-up."""
        run = self._run(number)
        samples: list[Sample] = []
        seconds = seconds_of(lambda: samples.extend(consume(run)))
        return UntimedRuns(
            seconds, sum(sample.stats.seconds.get("forward", 0.0) for sample in samples)
        )

    def timed(self, number: int, clock: Clock, found: TimedRuns) -> None:
        """A run with all parts timed and counted."""
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
    """Runs all steps."""
    return list(run)


@contextmanager
def wrapped_engine(run: Run, clock: Clock) -> Iterator[None]:
    """Timers around the parts that an engine calls."""
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
        engine.listeners = [clock.wrap(_label(one, engine), one) for one in listeners]
        try:
            yield
        finally:
            engine.listeners = listeners


def _label(listener: Callable[..., Any], engine: Any) -> str:
    owner = getattr(listener, "__self__", None)
    if isinstance(owner, TimedRuns):
        return COUNTING
    return "learn" if owner is engine.drafter else "statistics"


@contextmanager
def wrapped_target(target: Any, clock: Clock) -> Iterator[None]:
    """Timers around the parts of our decoder, or around the native kernels.

    The pass of a model run by transformers is one line, "forward: rest".
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
    """Synchronises a GPU; None on a CPU."""
    device = getattr(getattr(model.target, "model", None), "device", None)
    if getattr(device, "type", "cpu") != "cuda":
        return None
    import torch

    return lambda: torch.cuda.synchronize(device)
